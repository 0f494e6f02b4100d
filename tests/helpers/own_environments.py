"""Environments and tools of users, good and bad, which the tests name by path."""

import random
import time


class Guess:
    """Asks for the row's answer; says what was wrong."""

    def __init__(self, patience=0.0):
        self.patience = patience

    def reset(self, example, seed):
        self.answer, self.tries = example["answer"], 0
        return f"Seed {seed}."

    def step(self, action):
        time.sleep(self.patience)
        self.tries += 1
        if action.strip() == self.answer:
            return None, 1.0, True
        return f"not {action.strip()}", -0.1, False


class Faulty(Guess):
    """Does what the model says, which may be bad."""

    def step(self, action):
        if "raise" in action:
            raise KeyError("nothing\nhere")
        if "hang" in action:
            time.sleep(60)
        if "exit" in action:
            import os

            os._exit(3)
        if "nan" in action:
            return "", float("nan"), False
        if "four" in action:
            return "", 0.0, False, {}
        return super().step(action)


class Trl:
    """As TRL's environment_factory takes it."""

    def __init__(self):
        self.counter = 0

    def reset(self, **row):
        self.target = int(row["answer"])
        return " Use the tool."

    def increment(self, by: int) -> int:
        """Count on.

        Args:
            by: how far to count

        Returns:
            Where the counter is.
        """
        self.counter += by
        return self.counter

    async def peek(self) -> int:
        """Look at the counter.

        Returns:
            Where the counter is.
        """
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == self.target)


class Silent:
    def reset(self):
        return None


class Stepless:
    pass


def untyped(expression):
    """Has no types."""


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: what is doubled

    Returns:
        The double.
    """
    return 2 * number


def drawn() -> Guess:
    """A function that makes an environment."""
    return Guess(patience=random.random() * 0.01)
