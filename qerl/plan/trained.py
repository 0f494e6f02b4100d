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
from qerl.checkpoint.experts import Decoder, matching
from qerl.config.names import adapts_experts, expert_rank
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


@dataclass(frozen=True)
class Adapter:
    """What a run trains: an adapter beside the base. The other kinds are below; `trainee` chooses."""

    adapter: AdapterConfig
    qat: QatConfig | None
    format: str  # of the base
    state_bytes: int  # the optimizer's moments, per parameter

    gradient_bytes = 0  # of the gradient of a trained weight, if the weights themselves have one

    def trained(self, sizes: ModelSizes, ranks: int = 1) -> Trained:
        """Its size in a model. Of weights that `ranks` share out, what the rank with the most has.

        Raises ConfigError for patterns that do not fit the model.
        """
        adapter = self.adapter
        count = sizes.adapter(adapter.rank, adapter.targets) + expert_parameters(adapter, sizes)
        return Trained("adapter", count, BYTES["float32"], self.state_bytes, ADAPTER_WORK)

    @property
    def start_rank(self) -> int:
        """The rank of the start that stays beside the base; 0 without one. `auto` is what it usually stands for."""
        kind = DEFAULT_START if self.adapter.start == "auto" else self.adapter.start
        if kind != "frozen" or not formats.get(self.format).takes_start:
            return 0
        return self.adapter.start_rank or DEFAULT_RANK

    @property
    def acting_rank(self) -> int:
        """The rank of all that acts beside a linear's own weight in the trainer: start and adapter."""
        return self.adapter.rank + self.start_rank

    @property
    def engine_rank(self) -> int:
        """The rank of the adapter that the engine multiplies by; 0 where what is trained is in the packed weights."""
        return self.adapter.rank

    @property
    def engine_expert_rank(self) -> int:
        """The rank of the adapter on experts that the engine multiplies by, if the model has some; 0 for none."""
        return expert_rank(self.adapter) if adapts_experts(self.adapter) else 0

    def start_bytes(self, sizes: ModelSizes) -> int:
        """The 16-bit weights that an adapter is added to when it is packed; 0 in runs that keep none."""
        return 0


class PackedAdapter(Adapter):
    """An adapter that each sync packs into the base."""

    start_rank = engine_rank = engine_expert_rank = 0

    def start_bytes(self, sizes: ModelSizes) -> int:
        return 2 * sum(map(math.prod, sizes.shapes_of(sizes.decoder.targets(self.adapter.targets))))


class Weights(Adapter):
    """Whole weights behind packed ones."""

    start_rank = acting_rank = engine_rank = engine_expert_rank = 0

    def trained(self, sizes: ModelSizes, ranks: int = 1) -> Trained:
        """There the gradient of one layer exists beside those, until it has been summed."""
        dealt = shared_out(trained_linears(self.qat, sizes.decoder), ranks)
        of_ranks = [[sum(math.prod(sizes.shape_of(name)) for name in layer) for layer in layers] for layers in dealt]
        count = max(map(sum, of_ranks)) + (sizes.norms * sizes.layers * sizes.hidden if self.qat.train_norms else 0)
        passing = max(numbers for layers in of_ranks for numbers in layers) if ranks > 1 else 0
        width = self.gradient_bytes
        gradient = width * (count + passing) / count
        return Trained(f"masters ({masters_dtype(self.qat)})", count, width, self.state_bytes, gradient)

    @property
    def gradient_bytes(self) -> int:
        return BYTES[masters_dtype(self.qat)]


def trainee(adapter: AdapterConfig, qat: QatConfig | None, format: str, optimizer: str) -> Adapter:
    """What a recipe trains, over a base in that format."""
    kind = Adapter if qat is None else {"adapter": PackedAdapter, "weights": Weights}[qat.mode]
    return kind(adapter, qat, format, 2 if optimizer in ("auto", "adamw_8bit") else 8)


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
    from qerl.checkpoint.source import by_layer

    layers = by_layer(linears)
    parts = [len(layers) * rank // ranks for rank in range(ranks + 1)]
    return [layers[first:end] for first, end in pairwise(parts)]


def quantized_linears(qat: QatConfig, decoder: Decoder) -> list[str]:
    """The linears of a model that are packed. Raises ConfigError for patterns that do not fit."""
    linears = decoder.linears()
    kept = set(matching(linears, qat.quant_cfg.ignore, "qat.quant_cfg.ignore"))
    if len(kept) == len(linears):
        raise ConfigError(
            f"qat.quant_cfg keeps all {decoder.layers} decoder layers in 16 bits: write narrower patterns in ignore"
        )
    return [name for name in linears if name not in kept]


def trained_linears(qat: QatConfig, decoder: Decoder) -> list[str]:
    """The linears that are trained. Raises ConfigError for patterns that do not fit."""
    if qat.targets is None:
        return quantized_linears(qat, decoder)
    return matching(decoder.linears(), qat.targets, "qat.targets")


def masters_dtype(qat: QatConfig) -> str:
    """The dtype of the masters; `auto`, which `training.preflight.plan.settled_for` settles for a card, is float32."""
    return "float32" if qat.masters == "auto" else qat.masters
