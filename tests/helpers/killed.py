"""A stand-in for a kill at a chosen line of this process."""

from contextlib import contextmanager

import pytest


class Killed(Exception):
    """Raised in place of the kill."""


@contextmanager
def killed_in(owner, name, call=1):
    """End the block when `owner`'s function is called for the `call`-th time, before that call runs."""
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
