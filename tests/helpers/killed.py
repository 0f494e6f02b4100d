"""A kill at a chosen line, in process."""

from contextlib import contextmanager

import pytest


class Killed(Exception):
    """What stands for the kill."""


@contextmanager
def killed_in(owner, name, call=1):
    """The block ends in that call of `owner`'s function, instead of the call."""
    original, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            yield
