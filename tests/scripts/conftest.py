"""Fixtures for tests of scripts."""

import importlib
from pathlib import Path

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def load():
    """Import a script of a study by name, since the scripts import one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        yield importlib.import_module
