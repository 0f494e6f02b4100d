"""The adapter on a mixture of experts: rules for its keys, and what they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.config.conflict import Conflict, Conflicts
from qerl.config.names import OF_EXPERTS

if TYPE_CHECKING:
    from qerl.config.schema import AdapterConfig, RunConfig

PER_EXPERT_SHARE = 8  # each of many experts gets an eighth of the rank: as many parameters as a few experts have


def experts(config: RunConfig) -> Conflicts:
    """Keys of the adapter on experts are given only where there will be one."""
    adapter = config.adapter
    named = [name for name in OF_EXPERTS if name in adapter.targets]
    if adapter.experts == "per_expert" and not named:
        yield Conflict(
            {"adapter.experts": adapter.experts, "adapter.targets": list(adapter.targets)},
            "these targets name none of the linears that experts consist of",
            f"adapter.targets with {', '.join(OF_EXPERTS)}, or leave adapter.experts out",
        )
    if adapter.expert_rank is not None and (adapter.experts == "none" or not named):
        yield Conflict(
            {"adapter.expert_rank": adapter.expert_rank, "adapter.experts": adapter.experts},
            "experts get no adapter",
            "adapter.experts: shared or per_expert with gate_proj, up_proj and down_proj in adapter.targets, or leave "
            "adapter.expert_rank out",
        )


def adapts_experts(adapter: AdapterConfig) -> bool:
    """Whether the experts of a model that has some get an adapter."""
    return adapter.experts != "none" and any(name in adapter.targets for name in OF_EXPERTS)


def expert_rank(adapter: AdapterConfig) -> int:
    """The rank of the adapter on each expert, by `adapter.expert_rank` or what it is by default."""
    if adapter.expert_rank is not None:
        return adapter.expert_rank
    return adapter.rank if adapter.experts == "shared" else max(1, adapter.rank // PER_EXPERT_SHARE)
