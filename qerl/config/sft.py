"""Supervised fine-tuning: the section `sft`. Importing this loads pydantic and nothing heavier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qerl.config.section import Section


class SftConfig(Section):
    """Supervised fine-tuning: given conversations are learned, of which the assistant's tokens have a loss."""

    rows_per_step: int = Field(64, ge=1, description="rows in an optimizer step")
    max_tokens: int = Field(4096, ge=2, description="the longest row, in tokens of the whole conversation")
    long_rows: Literal["drop", "truncate"] = Field(
        "drop", description="what becomes of longer rows: left out, or cut at that length; both are counted"
    )
