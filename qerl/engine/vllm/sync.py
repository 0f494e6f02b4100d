"""Where the checkpoint's linears lie in vLLM's fused ones, and how an adapter is copied into their static buffers.

The frozen start of a base (`qerl.checkpoint.base_start`) has the first columns of each slot. It is written once, when
the engine opens; the adapter of a sync comes after it.

Nothing is copied before every tensor has its place and no place lacks a tensor. An adapter may cover only some of the
projections (`adapter.targets`), but those in every layer; the buffers of the others hold zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.base.errors import EngineError
from qerl.checkpoint.linears import GATE_UP, QKV
from qerl.engine.update import check_names

if TYPE_CHECKING:
    import torch
    from torch import nn

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
FUSED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}  # vLLM's name -> the checkpoint's


@dataclass(frozen=True)
class AdapterSlot:
    """Where the factors of one base linear lie in the buffers of the fused linear that it is part of."""

    lora_a: torch.Tensor  # (parts * max_rank, in)
    lora_b: torch.Tensor  # (out of all parts, parts * max_rank)
    first: int  # its first row of A, which is also its first column of B
    row_start: int  # its first row of B
    rows: int
    frozen: int = 0  # rows of A, from the first one on, that a start has

    @property
    def in_features(self) -> int:
        return self.lora_a.shape[1]


def adapter_slots(linears: Mapping[str, nn.Module], frozen: int = 0) -> dict[str, AdapterSlot]:
    """The slots by base module name, of which a start has rank `frozen`. `linears` are vLLM's, by their names there."""
    slots = {}
    for name, layer in linears.items():
        fused = parts(name, layer)
        max_rank = layer.lora_a.shape[0] // len(fused)
        for index, (part, start, rows) in enumerate(fused):
            slots[part] = AdapterSlot(layer.lora_a, layer.lora_b, index * max_rank, start, rows, frozen)
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
    """(A and B by base linear, trained weights by norm). Raises EngineError if anything does not fit."""
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
    """Overwrite the buffers with A and with B times `scaling`, and the parts of them that get no factors with zeros.

    A is zeroed there too: if an earlier adapter diverged and left a NaN, a zero in B would not remove it.
    """
    import torch

    with torch.no_grad():
        for name, slot in slots.items():
            a, b = factors.get(name, (None, None))
            rank = 0 if a is None else a.shape[0]
            first = slot.first + slot.frozen
            columns, unused = slice(first, first + rank), slice(first + rank, _end(slot, slots))
            rows = slice(slot.row_start, slot.row_start + slot.rows)
            if a is not None:
                slot.lora_a[columns].copy_(a)
                slot.lora_b[rows, columns].copy_(b * scaling)
            slot.lora_a[unused].zero_()
            slot.lora_b[rows, unused].zero_()


def write_start_(
    tensors: Mapping[str, torch.Tensor], slots: Mapping[str, AdapterSlot]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a start's A0 and B0 into the slots; returns views of them, (r0, in) and (out, r0), by base linear.

    Slots of linears that the start does not have keep zeros. Raises EngineError for factors that do not fit.
    """
    import torch

    factors, _ = split_adapter(tensors, slots, {}, next(iter(slots.values())).frozen)
    views = {}
    with torch.no_grad():
        for name, (a, b) in factors.items():
            slot = slots[name]
            columns, rows = (
                slice(slot.first, slot.first + slot.frozen),
                slice(slot.row_start, slot.row_start + slot.rows),
            )
            views[name] = slot.lora_a[columns].copy_(a), slot.lora_b[rows, columns].copy_(b)
    return views


def _end(slot: AdapterSlot, slots: Mapping[str, AdapterSlot]) -> int:
    """One past the last of the slot's columns of B."""
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
