"""Comparing answers as mathematics."""
