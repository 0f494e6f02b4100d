"""Whether a run can begin from an adapter: it has to be of the run's base, and of the recipe's rank, scale and places.

Importing this loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.adapter_fit import A_SUFFIX, check_fit, is_block_norm
from qerl.checkpoint.expert_adapter import OF_EXPERTS, describe, is_of_experts
from qerl.checkpoint.linears import PROJECTIONS
from qerl.config.rules_experts import expert_rank

if TYPE_CHECKING:
    import torch

    from qerl.config.schema import AdapterConfig


def check_warm_start(adapter: Path, base: str, own: AdapterConfig) -> None:
    """Raise ConfigError if the adapter contradicts the recipe's `own`, CheckpointError if it has another base."""
    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    _check_places(adapter, tensors, own)
    rank, scale = own.rank, own.alpha / own.rank
    factors = [name for name in tensors if name.endswith(A_SUFFIX) and not is_of_experts(name)]
    ranks = {tensors[name].shape[0] for name in factors}
    if ranks != {rank}:
        found = " and ".join(map(str, sorted(ranks)))
        raise ConfigError(
            f"{adapter} has rank {found} and the recipe adapter.rank {rank}: write adapter.rank: {found} and "
            f"adapter.alpha: {scaling * max(ranks, default=rank):g}"
        )
    if not math.isclose(scaling, scale):
        raise ConfigError(
            f"{adapter} was trained with alpha / rank {scaling:g} and would act with the recipe's {scale:g}: write "
            f"adapter.alpha: {scaling * rank:g}"
        )


def _check_places(adapter: Path, tensors: Mapping[str, torch.Tensor], own: AdapterConfig) -> None:
    """Raise ConfigError unless the adapter changes the linears and norms that the recipe trains."""
    factors = [name for name in tensors if name.endswith(A_SUFFIX) and not is_of_experts(name)]
    leaves = {name.removesuffix(A_SUFFIX).rpartition(".")[2] for name in factors}
    kind, rank = describe(tensors)
    if rank:
        leaves |= set(OF_EXPERTS)
        _check_experts(adapter, kind, rank, own)
    if leaves != set(own.targets) and not (own.experts == "none" and leaves == set(own.targets) - set(OF_EXPERTS)):
        found = ", ".join([name for name in PROJECTIONS if name in leaves] + sorted(leaves - set(PROJECTIONS)))
        raise ConfigError(
            f"{adapter} adapts {found} and the recipe's adapter.targets are {', '.join(own.targets)}: write "
            f"adapter.targets: [{found}]"
        )
    if (norms := any(map(is_block_norm, tensors))) != own.train_norms:
        has, other = ("", "false") if norms else ("no ", "true")
        raise ConfigError(
            f"{adapter} has {has}trained norms and the recipe adapter.train_norms: {other}: write "
            f"adapter.train_norms: {str(norms).lower()}"
        )


def _check_experts(adapter: Path, kind: str, rank: int, own: AdapterConfig) -> None:
    """Raise ConfigError unless the recipe has an adapter of this kind and rank on experts."""
    for key, found, asked in (("experts", kind, own.experts), ("expert_rank", rank, expert_rank(own))):
        if found != asked:
            raise ConfigError(
                f"{adapter} has an adapter on experts with {key} {found} and the recipe adapter.{key}: {asked}: write "
                f"adapter.{key}: {found}"
            )
