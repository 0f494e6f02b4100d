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
from qerl.formats.nvfp4.ways import padded_power

if TYPE_CHECKING:
    from qerl.config.quant import QatConfig
    from qerl.config.schema import AdapterConfig
    from qerl.plan.sizes import ModelSizes

BYTES = {"float32": 4, "bfloat16": 2}
DEFAULT_START = "frozen"  # what `adapter.start: auto` takes where the base has a start (docs/lab/study.md)
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


def trained_of(
    adapter: AdapterConfig, qat: QatConfig | None, optimizer: str, sizes: ModelSizes, ranks: int = 1
) -> Trained:
    """What a run trains of a model; of whole weights that `ranks` share out, what the rank with the most has.

    There the gradient of one layer exists beside those, until it has been summed. Raises ConfigError for patterns that
    do not fit the model.
    """
    state = 2 if optimizer in ("auto", "adamw_8bit") else 8
    if not trains_masters(qat):
        count = sizes.adapter(adapter.rank, adapter.targets) + expert_parameters(adapter, sizes)
        return Trained("adapter", count, BYTES[adapter.dtype], state, ADAPTER_WORK)
    dealt = shared_out(trained_linears(qat, sizes.layers), ranks)
    of_ranks = [[sum(_numbers(name, sizes) for name in layer) for layer in layers] for layers in dealt]
    count = max(map(sum, of_ranks)) + (2 * sizes.layers * sizes.hidden if qat.train_norms else 0)
    passing = max(numbers for layers in of_ranks for numbers in layers) if ranks > 1 else 0
    width = BYTES[masters_dtype(qat)]
    gradient = width * (count + passing) / count
    return Trained(f"masters ({masters_dtype(qat)})", count, width, state, gradient)


def expert_parameters(adapter: AdapterConfig, sizes: ModelSizes) -> int:
    """Parameters of the adapter on experts; 0 for a model without experts, and where they get none."""
    if not (sizes.decoder.has_experts and adapts_experts(adapter)):
        return 0
    return sizes.expert_adapter(expert_rank(adapter), adapter.experts == "shared")


def engine_expert_parameters(adapter: AdapterConfig, sizes: ModelSizes) -> int:
    """Of the engine's copy of the adapter on experts, whose rank is padded for its products."""
    rank = expert_rank(adapter)
    return expert_parameters(adapter, sizes) * padded_power(rank) // rank


def shared_out(linears: Sequence[str], ranks: int) -> list[list[list[str]]]:
    """For each rank the decoder layers that it has the masters of: neighbours, each layer as the names of its linears.

    Two ranks differ by at most one layer.
    """
    layers = by_layer(linears)
    parts = [len(layers) * rank // ranks for rank in range(ranks + 1)]
    return [layers[first:end] for first, end in pairwise(parts)]


def _numbers(linear: str, sizes: ModelSizes) -> int:
    return math.prod(sizes.projections[linear.rpartition(".")[2]])


def trains_masters(qat: QatConfig | None) -> bool:
    """Whether a run trains whole weights, and not an adapter."""
    return qat is not None and qat.mode == "weights"


def start_rank(adapter: AdapterConfig, qat: QatConfig | None, format: str) -> int:
    """The rank of the start that stays beside the base; 0 without one. `auto` is what it usually stands for."""
    kind = DEFAULT_START if adapter.start == "auto" else adapter.start
    if qat is not None or kind != "frozen" or formats.get(format).shared_tensor is None:
        return 0
    return adapter.start_rank or DEFAULT_RANK


def acting_rank(adapter: AdapterConfig, qat: QatConfig | None, format: str) -> int:
    """The rank of all that acts beside a linear's own weight in the trainer: start and adapter."""
    return (0 if trains_masters(qat) else adapter.rank) + start_rank(adapter, qat, format)


def engine_rank(adapter: AdapterConfig, qat: QatConfig | None) -> int:
    """The rank of the adapter that the engine multiplies by; 0 where all that is trained is in the packed weights."""
    return adapter.rank if qat is None else 0


def engine_expert_rank(adapter: AdapterConfig, qat: QatConfig | None) -> int:
    """The rank of the adapter on experts that the engine multiplies by, if the model has some; 0 for none."""
    return expert_rank(adapter) if qat is None and adapts_experts(adapter) else 0


def start_bytes(adapter: AdapterConfig, qat: QatConfig | None, sizes: ModelSizes) -> int:
    """The 16-bit weights that an adapter is added to when it is packed; 0 in runs that keep none."""
    if qat is None or qat.mode != "adapter":
        return 0
    shapes = (sizes.projections[name] for name in adapter.targets)
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
    """The dtype of the masters; `auto`, which `training.preflight.plan.settled_for` settles for a card, is float32."""
    return "float32" if qat.masters == "auto" else qat.masters
