"""Prompts in, completions out: data order, sampling, noise and the choice of groups."""
