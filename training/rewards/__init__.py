"""Completions in, rewards out."""
