"""Checks of a run before anything heavy is loaded."""
