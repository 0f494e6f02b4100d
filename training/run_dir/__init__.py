"""The files of a run: what it writes, and how it continues from there."""
