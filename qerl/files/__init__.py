"""Reading and writing files so that a kill, a full disk or a typing mistake costs nothing."""
