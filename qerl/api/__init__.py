"""The Python interface, `import qerl`: what the commands do, as functions that return values and leave no state."""
