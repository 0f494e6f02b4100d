"""Read the config.yaml that a run saved, as plain data: a run of an older version may have keys that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, ValidationError

from qerl.base.bounded import read_text
from qerl.base.read_back import Shape
from qerl.config import yaml_text


class _Reward(Shape):
    name: str
    weight: FiniteFloat = 1.0


class _Source(Shape):
    name: str | None = None
    rewards: list[_Reward] | None = None


class _Data(Shape):
    sources: list[_Source] | None = None


class _Saved(Shape):
    """What reports and cards read of a configuration."""

    model: dict[str, Any] | None = None
    data: _Data | None = None
    run: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    rewards: list[_Reward] | None = None


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The data and the text of a run's config.yaml. Raises OSError, or ValueError if it is no such file."""
    text = read_text(path, 4 * yaml_text.CHARACTERS)
    data = yaml_text.parse(text).data
    if not isinstance(data, dict):
        raise ValueError("it holds no sections such as `model:`")
    try:
        _Saved.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return data, text
