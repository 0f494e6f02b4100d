"""Start from a saved adapter, after checking that it fits the recipe and the base, before an engine is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.adapter import PROJECTIONS, read_adapter
from qerl.checkpoint.adapter_fit import A_SUFFIX, check_fit, is_block_norm
from qerl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from qerl.config.schema import RunConfig


def check_warm_start(adapter: Path, base: str, config: RunConfig) -> None:
    """Raise ConfigError if the adapter contradicts the recipe, CheckpointError if it was trained on another base."""
    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    _check_places(adapter, tensors, config)
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


def _check_places(adapter: Path, tensors: Mapping[str, torch.Tensor], config: RunConfig) -> None:
    """Raise ConfigError unless the adapter changes the linears and norms that the recipe trains."""
    leaves = {name.removesuffix(A_SUFFIX).rpartition(".")[2] for name in tensors if name.endswith(A_SUFFIX)}
    if leaves != set(config.adapter.targets):
        found = ", ".join([name for name in PROJECTIONS if name in leaves] + sorted(leaves - set(PROJECTIONS)))
        raise ConfigError(
            f"{adapter} adapts {found} and the recipe's adapter.targets are {', '.join(config.adapter.targets)}: write "
            f"adapter.targets: [{found}]"
        )
    if (norms := any(map(is_block_norm, tensors))) != config.adapter.train_norms:
        has, other = ("", "false") if norms else ("no ", "true")
        raise ConfigError(
            f"{adapter} has {has}trained norms and the recipe adapter.train_norms: {other}: write "
            f"adapter.train_norms: {str(norms).lower()}"
        )
