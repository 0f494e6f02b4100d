"""Grading a completion: finding its answer and comparing it."""
