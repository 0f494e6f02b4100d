"""The weights of one projection of all experts of a layer, frozen, in their format.

The tensors are as in the format's linear, with the experts along a first dimension: for NVFP4 `weight_packed`
(experts, out, in/2), `weight_scale` (experts, out, in/16) and `weight_global_scale` (experts, 1), for a 16-bit format
`weight` (experts, out, in). An engine that keeps experts in a layout of its own is another class with the same
`experts`, `out_features`, `in_features`, `compute_dtype`, `weight_device` and `dense`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from qerl.base.errors import CheckpointError
from qerl.formats import BF16
from qerl.formats.base import Format
from qerl.formats.linear import CachedWeight, PackedLinear, moved_with_its_bits

# Weights that are decoded at once. Plain torch needs 6 bytes for each of them beside the result: 0.2 GiB on a GPU, and
# on a CPU what stays in its cache.
PIECE, CPU_PIECE = 2**25, 2**18


class ExpertWeights(CachedWeight, nn.Module):
    """W (experts, out_features, in_features). Casting the module changes `compute_dtype` and dense weights alone."""

    def __init__(
        self,
        format: Format,
        shape: tuple[int, int, int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        parts: int = 1,
    ) -> None:
        """Weights of `shape` to load tensors into; an expert has the rows of `parts` linears in files.

        Raises CheckpointError for a shape that the format cannot pack.
        """
        super().__init__()
        self._parts = parts
        self.format, self.compute_dtype = format, dtype or torch.get_default_dtype()
        self.experts, self.out_features, self.in_features = shape
        self._one = None
        empty = {"weight": torch.empty(shape[1:], dtype=self.compute_dtype, device="meta")}
        if format.quantized:
            format.check_features(*shape[1:], "an expert")
            self._one = [format.linear()(shape[2], shape[1], bias=False, device="meta", dtype=self.compute_dtype)]
            empty = dict(self._one[0].named_buffers())
        self._stored = dict(zip(format.tensors or empty, empty, strict=True))  # names in files and of buffers
        for name, tensor in empty.items():
            self.register_buffer(name, torch.empty((self.experts, *tensor.shape), dtype=tensor.dtype, device=device))

    @classmethod
    def over(cls, tensor: torch.Tensor) -> ExpertWeights:
        """16-bit weights that are `tensor` (experts, out, in) itself, which an engine holds."""
        weights = cls(BF16, tuple(tensor.shape), "meta", tensor.dtype)
        weights.weight = tensor
        return weights

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What there is to load for each expert's linears."""
        return tuple(self._stored)

    @property
    def weight_device(self) -> torch.device:
        return next(iter(self._buffers.values())).device

    def write_(self, name: str, expert: int, first_row: int, tensor: torch.Tensor) -> None:
        """Put the tensor `name` of one expert's linear in its place, whose rows begin at `first_row` of W.

        Linears that share the format's `shared_tensor` each write all of it. Raises CheckpointError for a tensor of
        another shape or kind.
        """
        own = self._buffers[self._stored[name]][expert]
        if name != self.format.shared_tensor:
            first = own.shape[0] * first_row // self.out_features  # of blocks, if a value is for several rows
            own = own[first : first + own.shape[0] // self._parts]
        if own.shape != tensor.shape or (self.format.quantized and own.dtype != tensor.dtype):
            raise CheckpointError(
                f"expert {expert} has {name} as {tensor.dtype} {list(tensor.shape)}, and config.json says {own.dtype} "
                f"{list(own.shape)}: copy weights and config.json from the same checkpoint"
            )
        own.copy_(tensor)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, computed anew."""
        if self._one is None:
            return self.weight.to(dtype)
        dense = torch.empty(self.experts, self.out_features, self.in_features, dtype=dtype, device=self.weight_device)
        step = self._experts_at_once()
        for first in range(0, self.experts, step):
            some = slice(first, first + step)
            dense[some] = self._one_below_the_other(some).unpack(dtype).view_as(dense[some])
        return dense

    def dense_expert(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """W (out_features, in_features) of one expert."""
        if self._one is None:
            return self.weight[expert].to(dtype)
        return self._one_below_the_other(slice(expert, expert + 1)).unpack(dtype)

    def _experts_at_once(self) -> int:
        if self.out_features % self.format.block_rows:
            return 1  # blocks of rows begin anew with each expert
        piece = CPU_PIECE if self.weight_device.type == "cpu" else PIECE
        return max(1, piece // (self.out_features * self.in_features))

    def _one_below_the_other(self, experts: slice) -> PackedLinear:
        """A linear with the rows of these experts, with a `shared_tensor` that has a value for each row."""
        (linear,) = self._one
        for name, buffer in self._stored.items():
            tensor = self._buffers[buffer][experts]
            shared = name == self.format.shared_tensor
            linear._buffers[buffer] = tensor.repeat_interleave(self.out_features, 0) if shared else tensor.flatten(0, 1)
        return linear

    def extra_repr(self) -> str:
        shape = f"{self.experts} x {self.out_features} x {self.in_features}"
        return f"{shape}, format={self.format.name}, compute_dtype={self.compute_dtype}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertWeights:
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_device)).dtype
        self.drop_cached()
        return super()._apply(moved_with_its_bits(fn, self._buffers.values() if self._one else ()), recurse)
