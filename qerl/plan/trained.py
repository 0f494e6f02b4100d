"""What a run trains, and the bytes that it takes: an adapter, or whole weights behind packed ones. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import ConfigError
from qerl.checkpoint.base_start import DEFAULT_RANK
from qerl.checkpoint.experts import matching, projections
from qerl.checkpoint.source import by_layer
from qerl.config.experts import adapts_experts, expert_rank
from qerl.config.names import OF_EXPERTS
from qerl.formats.nvfp4.ways import padded_power
from qerl.model.costs import UNRECORDED

if TYPE_CHECKING:
    from qerl.checkpoint.experts import Decoder
    from qerl.config.quant import QatConfig
    from qerl.config.schema import RunConfig
    from qerl.plan.sizes import ModelSizes

BYTES = {"float32": 4, "bfloat16": 2}
DEFAULT_START = "frozen"  # what `adapter.start: auto` takes where the base has a start (docs/study.md)
ADAPTER_WORK = 16.0  # per parameter of an adapter: its gradient, optimizer state and copies in 16 bits


@dataclass(frozen=True)
class Trained:
    """How many parameters are trained, and bytes for each of them."""

    name: str  # what they are called in a plan
    count: int
    kept_bytes: int  # the parameter
    state_bytes: int  # the optimizer's moments
    gradient_bytes: float  # in a training phase; for an adapter with all that training adds

    @property
    def work_bytes(self) -> float:
        """What training adds to the parameters before the optimizer's first step, and that step itself."""
        return self.gradient_bytes if self.gradient_bytes == ADAPTER_WORK else self.gradient_bytes + self.state_bytes


def trained_of(config: RunConfig, sizes: ModelSizes, ranks: int = 1) -> Trained:
    """What `config` trains of a model; of whole weights that `ranks` share out, what the rank with the most has.

    There the gradient of one layer exists beside those, until it has been summed. Raises ConfigError for patterns that
    do not fit the model.
    """
    state = 2 if config.optim.name in ("auto", "adamw_8bit") else 8
    if not trains_masters(config):
        count = sizes.adapter(config.adapter.rank, config.adapter.targets) + expert_parameters(config, sizes)
        return Trained("adapter", count, BYTES[config.adapter.dtype], state, ADAPTER_WORK)
    dealt = shared_out(trained_linears(config.qat, sizes.layers), ranks)
    of_ranks = [[sum(_numbers(name, sizes) for name in layer) for layer in layers] for layers in dealt]
    count = max(map(sum, of_ranks)) + (2 * sizes.layers * sizes.hidden if config.qat.train_norms else 0)
    passing = max(numbers for layers in of_ranks for numbers in layers) if ranks > 1 else 0
    width = BYTES[masters_dtype(config.qat)]
    gradient = width * (count + passing) / count
    return Trained(f"masters ({masters_dtype(config.qat)})", count, width, state, gradient)


def expert_parameters(config: RunConfig, sizes: ModelSizes) -> int:
    """Parameters of the adapter on experts; 0 for a model without experts, and where they get none."""
    if not (sizes.decoder.has_experts and adapts_experts(config.adapter)):
        return 0
    return sizes.expert_adapter(expert_rank(config.adapter), config.adapter.experts == "shared")


def engine_expert_parameters(config: RunConfig, sizes: ModelSizes) -> int:
    """Of the engine's copy of the adapter on experts, whose rank is padded for its products."""
    rank = expert_rank(config.adapter)
    return expert_parameters(config, sizes) * padded_power(rank) // rank


def shared_out(linears: Sequence[str], ranks: int) -> list[list[list[str]]]:
    """For each rank the decoder layers that it has the masters of: neighbours, each layer as the names of its linears.

    Two ranks differ by at most one layer.
    """
    layers = by_layer(linears)
    parts = [len(layers) * rank // ranks for rank in range(ranks + 1)]
    return [layers[first:end] for first, end in pairwise(parts)]


def _numbers(linear: str, sizes: ModelSizes) -> int:
    return math.prod(sizes.projections[linear.rpartition(".")[2]])


def trains_masters(config: RunConfig) -> bool:
    """Whether a run trains whole weights, and not an adapter."""
    return config.qat is not None and config.qat.mode == "weights"


def adapter_rank(config: RunConfig) -> int:
    """The rank of the adapter that a run trains; 0 if it trains whole weights."""
    return 0 if trains_masters(config) else config.adapter.rank


def start_rank(config: RunConfig) -> int:
    """The rank of the start that stays beside the base; 0 without one. `auto` is what it usually stands for."""
    own = config.adapter
    kind = DEFAULT_START if own.start == "auto" else own.start
    if config.qat is not None or kind != "frozen" or formats.get(config.model.format).shared_tensor is None:
        return 0
    return own.start_rank or DEFAULT_RANK


def acting_rank(config: RunConfig) -> int:
    """The rank of all that acts beside a linear's own weight in the trainer: start and adapter."""
    return adapter_rank(config) + start_rank(config)


def engine_rank(config: RunConfig) -> int:
    """The rank of the adapter that the engine multiplies by; 0 where all that is trained is in the packed weights."""
    return config.adapter.rank if config.qat is None else 0


def engine_expert_rank(config: RunConfig) -> int:
    """The rank of the adapter on experts that the engine multiplies by, if the model has some; 0 for none."""
    return expert_rank(config.adapter) if config.qat is None and adapts_experts(config.adapter) else 0


def start_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """The 16-bit weights that an adapter is added to when it is packed; 0 in runs that keep none."""
    if config.qat is None or config.qat.mode != "adapter":
        return 0
    shapes = (sizes.projections[name] for name in config.adapter.targets)
    return 2 * sizes.layers * sum(rows * columns for rows, columns in shapes)


def quantized_linears(qat: QatConfig, layers: int) -> list[str]:
    """The linears of a model of so many layers that are packed. Raises ConfigError for patterns that do not fit."""
    linears = projections(layers)
    kept = set(matching(linears, qat.quant_cfg.ignored(layers), "qat.quant_cfg.ignore"))
    if len(kept) == len(linears):
        raise ConfigError(
            f"qat.quant_cfg keeps all {layers} decoder layers in 16 bits: write narrower patterns in ignore, or "
            "smaller keep_first and keep_last"
        )
    return [name for name in linears if name not in kept]


def trained_linears(qat: QatConfig, layers: int) -> list[str]:
    """The linears that are trained. Raises ConfigError for patterns that do not fit."""
    if qat.targets is None:
        return quantized_linears(qat, layers)
    return matching(projections(layers), qat.targets, "qat.targets")


def masters_dtype(qat: QatConfig) -> str:
    """The dtype of the masters; `auto`, which `qerl.plan.plan.settled_for` settles for a card, is float32."""
    return "float32" if qat.masters == "auto" else qat.masters


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
