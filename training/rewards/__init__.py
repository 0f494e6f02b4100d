"""Rewards: they take completions and return one float for each."""
