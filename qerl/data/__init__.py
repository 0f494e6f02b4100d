"""Rows of a data set, and the examples of a task that are made from them."""
