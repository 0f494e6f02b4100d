"""What the sections of a RunConfig have in common. Importing this loads pydantic and nothing heavier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, no unknown keys, no conversion between types: `"8"` is not 8, and true is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
