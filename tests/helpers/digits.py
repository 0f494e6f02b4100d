"""The reward of the small run, in a file of its own as a user has it."""


def digits(completions, **columns):
    """Share of characters that are digits: dense, so that groups differ even on a random model."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
