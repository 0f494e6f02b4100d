"""Starting from a saved adapter: whether it fits the recipe and the base is said before an engine is opened."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.adapter import load_tensors_, read_adapter
from qerl.checkpoint import read_json
from qerl.errors import CheckpointError, ConfigError
from qerl.model import local_folder
from qerl.sizes import ModelSizes, sizes_of

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

    from qerl.config import RunConfig

logger = logging.getLogger(__name__)

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def check_warm_start(adapter: Path, base: str, config: RunConfig) -> None:
    """Raise ConfigError if the rank or alpha is not the recipe's, CheckpointError if the adapter is of another base."""
    tensors, scaling = read_adapter(adapter)
    rank, own = config.adapter.rank, config.adapter.alpha / config.adapter.rank
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A_SUFFIX)}
    if ranks != {rank}:
        found = " and ".join(map(str, sorted(ranks)))
        raise ConfigError(
            f"{adapter} has rank {found} and the recipe adapter.rank {rank}: write adapter.rank: {found} and "
            f"adapter.alpha: {scaling * max(ranks, default=rank):g}"
        )
    if not math.isclose(scaling, own):
        raise ConfigError(
            f"{adapter} was trained with alpha / rank {scaling:g} and would act with the recipe's {own:g}: write "
            f"adapter.alpha: {scaling * rank:g}"
        )
    _check_shapes(adapter, tensors, sizes_of(read_json(Path(local_folder(base)) / "config.json"), base), base)


def _check_shapes(adapter: Path, tensors: Mapping[str, torch.Tensor], sizes: ModelSizes, base: str) -> None:
    layers = set()
    for name, tensor in tensors.items():
        if not name.endswith((A_SUFFIX, B_SUFFIX)):
            continue
        parts = name.split(".")
        layers.add(next((int(part) for part in parts if part.isdigit()), -1))
        rows, columns = sizes.projections.get(parts[-3], (None, None))
        own, expected = (tensor.shape[1], columns) if name.endswith(A_SUFFIX) else (tensor.shape[0], rows)
        if own != expected:
            there = "missing" if expected is None else f"{rows} x {columns}"
            raise CheckpointError(
                f"{adapter} is of another base than {base}: its {name} is {tuple(tensor.shape)} and the base's "
                f"{parts[-3]} {there}; give the base it was trained on"
            )
    if layers != set(range(sizes.layers)):
        raise CheckpointError(
            f"{adapter} is of another base than {base}: it has {len(layers)} layers and the base {sizes.layers}; give "
            "the base it was trained on"
        )


def warm_start(policy: PeftModel, adapter: Path) -> None:
    """Put the saved tensors in place of the fresh ones."""
    tensors, _ = read_adapter(adapter)
    logger.info("starting from the adapter %s (%d tensors)", adapter, load_tensors_(policy, tensors))
