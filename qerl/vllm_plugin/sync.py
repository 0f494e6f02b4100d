"""Copy an adapter's tensors into the engine's static buffers, once each has its place and no place lacks one.

An adapter may cover some of the projections (`adapter.targets`), but then in every layer: a projection without an
adapter keeps zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.checkpoint.linears import GATE_UP, QKV
from qerl.engine.update import check_names
from qerl.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
FUSED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}  # vLLM's name -> the checkpoint's


@dataclass(frozen=True)
class AdapterSlot:
    """Where one base linear's factors lie: rows `a` of the fused A, rows `rows` and columns `a` of the fused B."""

    lora_a: torch.Tensor  # (parts * max_rank, in)
    lora_b: torch.Tensor  # (out of all parts, parts * max_rank)
    first: int  # first row of A and column of B
    row_start: int
    rows: int

    @property
    def in_features(self) -> int:
        return self.lora_a.shape[1]


def adapter_slots(linears: Mapping[str, nn.Module]) -> dict[str, AdapterSlot]:
    """Slots by base module name, for vLLM's linears by their names."""
    slots = {}
    for name, layer in linears.items():
        fused = parts(name, layer)
        max_rank = layer.lora_a.shape[0] // len(fused)
        for index, (part, start, rows) in enumerate(fused):
            slots[part] = AdapterSlot(layer.lora_a, layer.lora_b, index * max_rank, start, rows)
    return slots


def parts(name: str, layer: nn.Module) -> list[tuple[str, int, int]]:
    """(base module name, first row, rows) of each linear that `layer` fuses; `name` is vLLM's module name."""
    parent, _, leaf = name.rpartition(".")
    leaves = FUSED.get(leaf, (leaf,))
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.output_size]
    rows, start = [], 0
    for part, size in zip(leaves, sizes, strict=True):
        rows.append((f"{parent}.{part}" if parent else part, start, size))
        start += size
    return rows


def split_adapter(
    tensors: Mapping[str, torch.Tensor],
    slots: Mapping[str, AdapterSlot],
    norms: Mapping[str, nn.Module],
    max_rank: int,
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """(A and B by base linear, trained weights by norm). Raises EngineError if anything does not fit exactly."""
    a = {name.removesuffix(A_SUFFIX): tensor for name, tensor in tensors.items() if name.endswith(A_SUFFIX)}
    b = {name.removesuffix(B_SUFFIX): tensor for name, tensor in tensors.items() if name.endswith(B_SUFFIX)}
    trained = {n.removesuffix(".weight"): t for n, t in tensors.items() if not n.endswith((A_SUFFIX, B_SUFFIX))}
    if unpaired := sorted(set(a) ^ set(b)):
        raise EngineError(f"the adapter has only one of A and B for {unpaired[:4]}: its file is incomplete")
    if a and not slots:
        raise EngineError("the engine was opened without an adapter (max_rank 0): open it for the adapter's rank")
    check_names("linear", a, slots, "adapter")
    check_names("norm", trained, norms, "adapter")
    for name in a:
        _check_shapes(name, a[name], b[name], slots[name], max_rank)
    for name, tensor in trained.items():
        if tensor.shape != norms[name].gain.shape:
            raise EngineError(f"trained norm {name} has shape {tuple(tensor.shape)}: the adapter is of another base")
    return {name: (a[name], b[name]) for name in a}, trained


def copy_adapter_(
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], slots: Mapping[str, AdapterSlot], scaling: float
) -> None:
    """Overwrite the buffers: A, and B times `scaling`; what has no factors, and ranks above, become 0.

    In A too: 0 times what an earlier adapter left there is NaN if that had diverged.
    """
    import torch

    with torch.no_grad():
        for name, slot in slots.items():
            a, b = factors.get(name, (None, None))
            rank = 0 if a is None else a.shape[0]
            columns, unused = slice(slot.first, slot.first + rank), slice(slot.first + rank, _end(slot, slots))
            rows = slice(slot.row_start, slot.row_start + slot.rows)
            if a is not None:
                slot.lora_a[columns].copy_(a)
                slot.lora_b[rows, columns].copy_(b * scaling)
            slot.lora_a[unused].zero_()
            slot.lora_b[rows, unused].zero_()


def _end(slot: AdapterSlot, slots: Mapping[str, AdapterSlot]) -> int:
    """One past the slot's columns of B."""
    starts = [other.first for other in slots.values() if other.lora_b is slot.lora_b and other.first > slot.first]
    return min(starts, default=slot.lora_b.shape[1])


def _check_shapes(name: str, a: torch.Tensor, b: torch.Tensor, slot: AdapterSlot, max_rank: int) -> None:
    rank = a.shape[0]
    if a.shape != (rank, slot.in_features) or b.shape != (slot.rows, rank):
        raise EngineError(
            f"the adapter's {name} has A {tuple(a.shape)} and B {tuple(b.shape)}; the base is {slot.rows} x "
            f"{slot.in_features}: it was trained on another base"
        )
    if rank > max_rank:
        raise EngineError(f"the adapter has rank {rank}, the engine was opened for {max_rank}: open it for {rank}")
