"""What a sync brings to an engine: an adapter's tensors, or whole weights that the engine packs into its own.

Both kinds are written in place, into the tensors that the trainer and captured CUDA graphs read. `deliver` is how an
update is sent: it checks that the engine took all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qerl.engine.interface import Engine
    from qerl.model.master import LowRankSum

    Matrix = torch.Tensor | LowRankSum


@dataclass(frozen=True)
class AdapterUpdate:
    """The factors of a LoRA adapter, and trained norms.

    `tensors` has the names of `qerl.checkpoint.adapter.adapter_tensors`: base module names, ending in `.lora_A.weight`
    (r, in), `.lora_B.weight` (out, r), or `.weight` (d,) for a trained norm. `scaling` multiplies B. Those on experts
    have the names and shapes of `qerl.checkpoint.adapter_file`, some with the experts along a first dimension.
    """

    tensors: Mapping[str, torch.Tensor]
    scaling: float

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class WeightsUpdate:
    """Whole weights: dense matrices (out, in) by the linear's module name, trained norms (d,) by the norm's.

    A quantized linear gets the matrix rounded to its format, with the scales that depend on the matrix's dtype. Each
    matrix is read once. `weights` may compute it on access; a `LowRankSum` is computed a piece of its rows at a time.
    """

    weights: Mapping[str, Matrix]
    norms: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights) + len(self.norms)


Update = AdapterUpdate | WeightsUpdate
BESIDE_A_START = (
    "whole weights cannot be packed beside a start, which repairs the rounding of others: open the engine without it "
    "(adapter.start: none)"
)


def deliver(update: Update, engine: Engine) -> int:
    """Sync `engine` with `update`; returns the number of tensors that act. Raises EngineError unless that is all."""
    taken = engine.sync(update)
    if taken != len(update):
        raise EngineError(f"the engine took {taken} of the update's {len(update)} tensors: they do not fit it")
    return taken


def check_fit(update: WeightsUpdate, linears: Mapping[str, nn.Linear], norms: Mapping[str, torch.Tensor]) -> None:
    """Raise EngineError for names that have no place, norms that lack an update, and norms of another size.

    Any linears may be trained, also in some layers only. `norms` has the weights (d,) of the norms that can be.
    """
    check_places("linear", update.weights, linears)
    check_names("norm", update.norms, norms)
    for name, tensor in update.norms.items():
        if tensor.shape != norms[name].shape:
            raise EngineError(f"trained norm {name} has shape {tuple(tensor.shape)}: the update is of another base")


def write_update_(model: PreTrainedModel, update: WeightsUpdate) -> int:
    """Write an update of whole weights into a transformers model, in place; returns how many tensors were written.

    Raises EngineError for an update that does not fit.
    """
    import torch

    from qerl.checkpoint.adapter import base_linears, base_norms

    linears, norms = base_linears(model), base_norms(model)
    check_fit(update, linears, norms)
    with torch.no_grad():
        for name, tensor in update.norms.items():
            norms[name].copy_(tensor)
    return pack_weights_(update.weights, linears) + len(update.norms)


def pack_weights_(weights: Mapping[str, Matrix], linears: Mapping[str, nn.Linear]) -> int:
    """Write each matrix over the weight of the linear of that name, in place; returns how many were written.

    Raises EngineError for a matrix that its linear cannot hold. The engine then holds a part of the update, from which
    nothing may be sampled; masters and checkpoints are as they were.
    """
    import torch

    from qerl.model.master import pieces_of

    counted: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name in weights:
            matrix, linear = weights[name].detach(), linears[name]
            _check_shape(matrix, linear, name)
            of_pieces = [_write_(linear, rows, first) for first, rows in pieces_of(matrix, linear.weight.device)]
            if None not in of_pieces:
                counted[name] = sum(of_pieces)
    if counted:  # the card is asked once for all
        for name, faults in zip(counted, torch.stack([*counted.values()]).tolist(), strict=True):
            linears[name].refuse(faults, name)
    return len(weights)


def _check_shape(matrix: Matrix, linear: nn.Linear, name: str) -> None:
    if tuple(matrix.shape) != (linear.out_features, linear.in_features):
        raise EngineError(
            f"the update's {name} is {tuple(matrix.shape)}, and the linear ({linear.out_features}, "
            f"{linear.in_features}): the update is of another base"
        )


def _write_(linear: nn.Linear, rows: torch.Tensor, first: int) -> torch.Tensor | None:
    from qerl.formats.linear import PackedLinear

    if isinstance(linear, PackedLinear):
        return linear.write_(rows, first)
    linear.weight[first : first + len(rows)].copy_(rows)
    return None


def check_names(kind: str, given: Collection[str], places: Collection[str], what: str = "update") -> None:
    """Raise EngineError unless each name has a place, and what is given for one layer is given for every layer.

    Layers are alike by a module's last name and depth: where block norms are given, a final norm is not missed.
    """
    check_places(kind, given, places, what)
    alike = {(name.rpartition(".")[2], name.count(".")) for name in given}
    lacking = [name for name in set(places) - set(given) if (name.rpartition(".")[2], name.count(".")) in alike]
    if lacking:
        raise EngineError(
            f"the {what} has nothing for {sorted(lacking)[:4]} ({len(lacking)} places): it is of another base"
        )


def check_places(kind: str, given: Collection[str], places: Collection[str], what: str = "update") -> None:
    """Raise EngineError unless each name has a place."""
    if unknown := sorted(set(given) - set(places)):
        raise EngineError(
            f"the engine has no {kind} for {unknown[:4]} ({len(unknown)} of {len(given)}): the {what} is of another "
            "base"
        )
