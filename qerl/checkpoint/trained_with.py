"""What a run trained with that its model needs again later: the variables of the chat template. Loads no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef

logger = logging.getLogger(__name__)


def run_of(ref: ModelRef) -> Path | None:
    """The run directory that the model or its adapter belongs to, recognized by its files; None if it has none."""
    if ref.adapter is None:
        return ref.run
    folders = [ref.adapter, *ref.adapter.resolve().parents[:3]]
    runs = [folder for folder in folders if all((folder / f).is_file() for f in ("config.yaml", "metrics.jsonl"))]
    return runs[0] if runs else None


def switches_for(run: Path | None, asked: Mapping[str, object] | None) -> Mapping[str, object]:
    """The variables of the chat template that were asked for; for None those that the run trained with, if any."""
    if asked is not None or run is None:
        return asked or {}
    from qerl.config.recipe import load_config

    switches = load_config(run / "config.yaml").data.chat_template_kwargs
    if switches:
        logger.info("chat template with %s, as it trained", switches)
    return switches
