"""What an engine holds after a sync of whole weights: its bytes against the reference's, and where they lie."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from qerl.checkpoint.adapter import base_linears
from qerl.engine.update import WeightsUpdate
from qerl.formats.fp8 import reference as fp8
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.linear import PackedLinear
from qerl.formats.nvfp4 import kernel_layout, reference
from qerl.model.master import LowRankSum


class Finished(Exception):
    """Ends a run after what was to be seen of it."""


class Watch:
    """Within it, each sync of an engine of `kind` is timed, and the one number `last` is checked.

    `seen` then has `s` for each sync; `linears`, which the last one brought; `packed`, which the engine keeps packed;
    and the names of those that were `moved`, or are `different` from `reference.quantize` of their master, or of the
    16-bit weight with the adapter in it.
    """

    def __init__(self, kind: type, last: int, ends: bool = False) -> None:
        """`ends`: raise `Finished` after the last sync."""
        self.last, self.ends = last, ends
        self.seen: dict[str, Any] = {"s": []}
        self._kind, self._sync = kind, kind.sync
        self._addresses: dict[str, int] = {}

    def __enter__(self) -> Watch:
        watch = self

        def sync(engine: Any, update: WeightsUpdate) -> int:
            return watch.on_sync(engine, update)

        self._kind.sync = sync
        return self

    def __exit__(self, *exception: object) -> None:
        self._kind.sync = self._sync

    def on_sync(self, engine: Any, update: WeightsUpdate) -> int:
        linears = packed_linears(engine)
        self._addresses = self._addresses or {name: address(linear) for name, linear in linears.items()}
        _synchronize()
        started = time.perf_counter()
        count = self._sync(engine, update)
        _synchronize()
        self.seen["s"].append(time.perf_counter() - started)
        if len(self.seen["s"]) == self.last:
            moved = [name for name, linear in linears.items() if address(linear) != self._addresses[name]]
            self.seen |= {"linears": len(update.weights), "packed": len(linears), "moved": moved}
            self.seen["different"] = different(linears, update)
            if self.ends:
                raise Finished
        return count


def packed_linears(engine: Any) -> dict[str, PackedLinear]:
    """The linears that the engine keeps packed, by the names of the checkpoint."""
    if engine.name == "vllm":
        from qerl.engine.vllm.policy import linear_views

        found: dict[str, nn.Module] = linear_views(engine.found.model)
    else:
        found = base_linears(engine.policy_model())
    return {name: linear for name, linear in found.items() if isinstance(linear, PackedLinear)}


def address(linear: nn.Module) -> int:
    """Where the codes lie, or the 16-bit weights, that the engine multiplies by."""
    if hasattr(linear, "kernel_weight"):
        return linear.kernel_weight.words.data_ptr()
    held = next(name for name in ("weight_codes", "weight_packed", "weight") if hasattr(linear, name))
    return getattr(linear, held).data_ptr()


def different(linears: dict[str, PackedLinear], update: WeightsUpdate) -> list[str]:
    """The trained linears whose codes or block scales in the engine are not the reference's of their masters."""
    wrong, read = [], {}
    for name, linear in linears.items():
        if name not in update.weights:
            continue
        if isinstance(linear, FP8Linear):
            wrong += [] if _fp8_same(linear, update.weights[name]) else [name]
            continue
        if (key := address(linear)) not in read:  # a fused linear is read once for all of its parts
            read = {key: _held(linear)}
        start = getattr(linear, "row_start", 0)
        codes, scales = (part[start : start + linear.out_features] for part in read[key][:2])
        expected = reference.quantize(_dense(update.weights[name], codes.device), read[key][2].to(codes.device))
        same_codes = torch.equal(codes, reference.unpack_codes(expected.packed))
        wrong += [] if same_codes and torch.equal(scales, expected.block_scale.float()) else [name]
    return wrong


def _fp8_same(linear: FP8Linear, matrix: torch.Tensor | LowRankSum) -> bool:
    codes, scale = linear.weight_codes, linear.weight_scale
    expected = fp8.quantize(_dense(matrix, codes.device), linear.scales)
    same_codes = torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return same_codes and torch.equal(scale, expected.scale)


def _dense(matrix: torch.Tensor | LowRankSum, device: torch.device) -> torch.Tensor:
    """A master, or the sum of a weight and an adapter, which is computed on the CPU: the card has to agree with it."""
    if isinstance(matrix, LowRankSum):
        matrix = LowRankSum(matrix.start.cpu(), matrix.a.cpu(), matrix.b.cpu(), matrix.scaling).dense(
            torch.device("cpu")
        )
    return matrix.detach().to(device)


def _held(linear: PackedLinear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and global scale (1,) of the tensor that holds the linear."""
    if hasattr(linear, "kernel_weight"):
        weight = linear.kernel_weight
        return kernel_layout.codes(weight), kernel_layout.block_scales(weight), torch.tensor([weight.global_scale])
    codes = reference.unpack_codes(linear.weight_packed)
    return codes, linear.weight_scale.float(), linear.weight_global_scale


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
