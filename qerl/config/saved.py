"""Read the config.yaml that a run saved, as plain data: a run of an older version may have keys that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.config import yaml_text
from qerl.files.bounded import read_text


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The data and the text of a run's config.yaml. Raises OSError, or ValueError if it is no such file."""
    text = read_text(path, 4 * yaml_text.CHARACTERS)
    data = yaml_text.parse(text).data
    if not isinstance(data, dict):
        raise ValueError("it holds no sections such as `model:`")
    for section in ("model", "data", "run"):
        if not isinstance(data.get(section) or {}, dict):
            raise ValueError(f"its section `{section}` holds no keys")
    return data, text
