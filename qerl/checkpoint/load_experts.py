"""The experts of a checkpoint's layers in a transformers model: our blocks in place of its own, filled from files.

A file has three linears for each expert (`qerl.checkpoint.experts`), and memory one tensor for each kind of a layer's
tensors. Each expert is copied into its place as it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import DOWN, FUSED_GATE_UP, Decoder, Place
from qerl.checkpoint.reader import TensorReader

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qerl.checkpoint.shards import TensorInfo
    from qerl.formats.base import Format
    from qerl.formats.experts import ExpertWeights

SERVED = ("Qwen3-MoE",)  # the families that the plugin of vLLM knows
PARTS = {FUSED_GATE_UP: 2, DOWN: 1}  # how many linears of an expert are in one tensor in memory


def check_served_family(decoder: Decoder, folder: Path) -> None:
    """Raise CheckpointError for experts of a family that the transformers engine opens, and vLLM does not."""
    if decoder.has_experts and decoder.family.title not in SERVED:
        raise CheckpointError(
            f"{folder} is a mixture of experts of the family {decoder.family.title}, and qerl serves "
            f"{', '.join(SERVED)} with vLLM: take one of these, or write rollout.engine: transformers"
        )


def fill_experts_(
    model: nn.Module, decoder: Decoder, format: Format, tensors: Mapping[str, TensorInfo], dtype: torch.dtype
) -> dict[str, TensorInfo]:
    """Put our blocks into `model`, whose modules may have no storage, with the experts of a checkpoint's `tensors`.

    Products are in `dtype`. Returns the tensors that are left to load, by their names in memory. Raises CheckpointError
    for experts that do not fit config.json.
    """
    weights = _place_(model, decoder, format, dtype)
    own = check_complete(decoder, format, tensors)
    with TensorReader({name: tensors[name] for name in own}) as read:
        for name, place in own.items():
            weights[place.tensor].write_(name.rpartition(".")[2], place.expert, place.first_row, read(name))
    return {
        decoder.in_memory(name): replace(info, stored_as=info.stored_as or name)
        for name, info in tensors.items()
        if name not in own
    }


def place_blocks_(model: nn.Module, decoder: Decoder, weights: Mapping[str, nn.Module]) -> None:
    """Put our blocks in place of the model's; `weights` are those of the experts by their full names in memory."""
    from qerl.model.experts import ExpertBlock, Experts

    for number, layer in enumerate(decoder.sparse):
        inside = f"model.layers.{layer}"
        router = model.get_submodule(f"{inside}.mlp.gate")
        experts = Experts(weights[f"{inside}.{FUSED_GATE_UP}"], weights[f"{inside}.{DOWN}"])
        block = ExpertBlock(router, experts, decoder.chosen, decoder.normalises, number)
        model.set_submodule(f"{inside}.mlp", block)
    model.config.output_router_logits = False  # transformers would read them from its own routers, for a loss of theirs


def _place_(model: nn.Module, decoder: Decoder, format: Format, dtype: torch.dtype) -> dict[str, ExpertWeights]:
    """Our blocks in place of the model's, with empty weights, which are returned by their full names in memory."""
    from qerl.formats.experts import ExpertWeights

    placed = {
        f"model.layers.{layer}.{name}": ExpertWeights(format, decoder.shape_in_memory(name), "cpu", dtype, parts)
        for layer in decoder.sparse
        for name, parts in PARTS.items()
    }
    place_blocks_(model, decoder, placed)
    return placed


def check_complete(decoder: Decoder, format: Format, tensors: Mapping[str, TensorInfo]) -> dict[str, Place]:
    """The experts' tensors among a checkpoint's, with the place in memory of each.

    Raises CheckpointError if one that config.json describes is missing, and for more of them.
    """
    places = {name: decoder.place_of(name.rpartition(".")[0]) for name in tensors}
    own = {name: place for name, place in places.items() if place is not None}
    _check_names(decoder, format, set(own), next(iter(tensors.values())).file.parent)
    return own


def _check_names(decoder: Decoder, format: Format, names: set[str], folder: Path) -> None:
    linears = (linear for layer in decoder.sparse for expert in decoder.experts_of(layer) for linear in expert)
    expected = {f"{linear}.{part}" for linear in linears for part in format.tensors or ("weight",)}
    if missing := sorted(expected - names):
        raise CheckpointError(
            f"{folder} lacks experts that its config.json describes ({missing[0]}; {len(missing)} tensors in all): the "
            "checkpoint is incomplete, or quantized in part; copy or quantize it again"
        )
    if more := sorted(names - expected):
        raise CheckpointError(
            f"{folder} holds {more[0]}, which no {format.label} expert has ({len(more)} tensors in all): copy or "
            "quantize it again"
        )
