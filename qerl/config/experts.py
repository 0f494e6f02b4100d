"""Rules about the adapter on a mixture of experts, and what is known of them only beside a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter_file import OF_EXPERTS
from qerl.config.conflict import Conflict, Conflicts
from qerl.engine.interface import UNRECORDED

if TYPE_CHECKING:
    from qerl.checkpoint.experts import Decoder
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


def check_experts(config: RunConfig, decoder: Decoder) -> None:
    """Raise ConfigError for keys that do not fit a model: of experts where it has none, or what experts cannot have."""
    problem = _of_experts(config, decoder) if decoder.has_experts else _of_dense(config)
    if problem is not None:
        raise ConfigError(problem)


def _of_dense(config: RunConfig) -> str | None:
    given = {
        "adapter.experts": None if config.adapter.experts == "shared" else config.adapter.experts,
        "adapter.expert_rank": config.adapter.expert_rank,
        "rollout.router_replay": None if config.rollout.router_replay else "false",
    }
    key, value = next(((key, value) for key, value in given.items() if value is not None), (None, None))
    if key is None:
        return None
    return f"{key} {value}: {config.model.base} has no experts: leave {key} out, or give a mixture of experts"


def _of_experts(config: RunConfig, decoder: Decoder) -> str | None:
    adapter = config.adapter
    if config.qat is not None:
        return (
            f"qat: {config.model.base} is a mixture of experts, whose weights qerl does not train: leave the section "
            "qat out, and an adapter is trained"
        )
    if not formats.get(config.model.format).holds_experts:
        return (
            f"model.format {config.model.format}: {config.model.base} is a mixture of experts, which qerl has in "
            f"{' and '.join(each.name for each in formats.all_formats() if each.holds_experts)}: write one of these"
        )
    if config.train.fp8_recipe is not None:
        return (
            f"train.fp8_recipe {config.train.fp8_recipe}: {config.model.base} is a mixture of experts, whose products "
            "are computed in 16 bits: leave train.fp8_recipe out"
        )
    if config.rollout.router_replay and decoder.experts > UNRECORDED:
        return (
            f"rollout.router_replay: {config.model.base} has {decoder.experts} experts in a layer, and choices are "
            f"recorded of up to {UNRECORDED}: write rollout.router_replay: false"
        )
    if len(decoder.sparse) == decoder.layers and all(name in OF_EXPERTS for name in adapter.targets):
        return (
            f"adapter.targets: {', '.join(adapter.targets)} names no linear of attention, and an adapter on experts "
            "needs one beside it: add q_proj, k_proj, v_proj or o_proj"
        )
    if not adapts_experts(adapter):
        return None
    named = [name for name in OF_EXPERTS if name in adapter.targets]
    if len(named) < len(OF_EXPERTS):
        return (
            f"adapter.targets names {' and '.join(named)}, and the experts of {config.model.base} are adapted as a "
            f"whole: name all of {', '.join(OF_EXPERTS)}, or none of them"
        )
    if adapter.dropout:
        return (
            f"adapter.dropout {adapter.dropout}: files of adapters on experts have none (PEFT's target_parameters): "
            "write adapter.dropout: 0, or adapter.experts: none"
        )
    most = min(decoder.width, decoder.hidden)
    if (rank := expert_rank(adapter)) > most:
        key = "adapter.rank" if adapter.expert_rank is None else "adapter.expert_rank"
        return f"{key} {rank} is more than any expert of {config.model.base} can have: write {key}: {most} or less"
    return None
