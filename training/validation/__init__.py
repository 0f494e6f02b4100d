"""Validation inside a run: questions that the policy answers between steps, and what follows from the answers."""
