"""The linear of a block-scaled FP8 checkpoint in the trainer: `PackedLinear` over the two tensors of `layout.py`.

In a state dict the codes are `weight`, as in a checkpoint; on the module that name is `PackedLinear.weight`, so the
buffer is `weight_codes`. The tensors may be rows of a larger weight of an engine, which is then shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from qerl.base.errors import CheckpointError, EngineError
from qerl.formats.fp8 import layout, reference
from qerl.formats.fp8.reference import E4M3, FP8Tensor, ScaleKind
from qerl.formats.linear import PackedLinear

CODES = "weight_codes"
ROWS = 2048  # tokens that `multiplied` rounds at a time

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ScaleKind], torch.Tensor]

PRODUCTS: dict[str, Product] = {}  # device type -> faster twin of reference.product; an engine brings its card's


class FP8Linear(PackedLinear):
    """See `PackedLinear`. Raises CheckpointError if tensors do not fit when they are loaded."""

    rounds_input = True  # whether both sides of the product are in FP8; the gradient to the input is in 16 bits
    _scales: ScaleKind | None = None  # of the weight that was loaded; None until it is asked for

    @classmethod
    def from_tensors(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> FP8Linear:
        """See `PackedLinear.of_buffers`. Of scales in 16 bits there is a float32 copy."""
        tensors = FP8Tensor(codes, scale.float()).named()
        shape = layout.check_tensors(tensors)
        layout.check_values(tensors)
        return cls.of_buffers({CODES: codes, layout.SCALE: tensors[layout.SCALE]}, shape, bias, compute_dtype)

    def empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        specs = layout.tensor_specs(self.out_features, self.in_features)
        codes = torch.zeros(specs[layout.CODES].shape, dtype=E4M3, device=device)
        ones = torch.ones(specs[layout.SCALE].shape, dtype=torch.float32, device=device)
        return {CODES: codes, layout.SCALE: ones}

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return decode(self.weight_codes, self.weight_scale, dtype)

    def product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.rounds_input:
            return super().product(x, dtype)
        y = self.own_product(x.to(dtype))
        return y if self.bias is None else y + self.bias.to(dtype)

    def own_product(self, x: torch.Tensor, others: Sequence[nn.Module] = ()) -> torch.Tensor | None:
        """x W^T (..., out) with x rounded too, under scales of the weight's kind; None if x is not to be rounded.

        With `others`, W has their rows too; None unless these follow this linear's in one weight.
        """
        weight = joined([self, *others]) if self.rounds_input else None
        if weight is None:
            return None
        if (product := PRODUCTS.get(x.device.type)) is not None:
            y = product(x.reshape(-1, x.shape[-1]), *weight, self.scales)
            return y.view(*x.shape[:-1], len(weight.codes))
        wide = reference.dequantize_input(*reference.quantize_input(x, self.scales))
        dense = reference.dequantize_unchecked(*weight, torch.float32) if others else self.dense(torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(wide, dense).to(x.dtype)

    def multiplied(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        """See `PackedLinear.multiplied`. Some tokens at a time, since rounding works in float32."""
        if not self.rounds_input:
            return x
        rounded = x if spare else torch.empty_like(x)
        for out, rows in zip(rounded.split(ROWS), x.split(ROWS), strict=True):
            out.copy_(reference.dequantize_input(*reference.quantize_input(rows, self.scales)))
        return rounded

    def codes_in_blocks(self, others: Sequence[nn.Module] = ()) -> FP8Tensor | None:
        return joined([self, *others]) if others else FP8Tensor(self.weight_codes, self.weight_scale)

    @property
    def own_recipe(self) -> str | None:
        return "blockwise" if self.rounds_input else None

    @property
    def scales(self) -> ScaleKind:
        """Whether scales are powers of two, which they stay when the weight is written."""
        if self._scales is None:
            self._scales = reference.scale_kind(self.weight_scale)
        return self._scales

    @scales.setter
    def scales(self, kind: ScaleKind) -> None:
        """For rows of a weight whose other rows decide it, too."""
        self._scales = kind

    def write_(self, matrix: torch.Tensor, row_start: int = 0) -> torch.Tensor:
        """See `PackedLinear.write_`: the bits equal `reference.quantize`, with scales of the same kind.

        A part of the rows begins with a block and ends with one or with the weight. The faults are those of
        `reference.faults`.
        """
        matrix = matrix.to(self.weight_codes.device)
        first, end = row_start // layout.BLOCK, layout.blocks(row_start + len(matrix))
        codes, scale = self.weight_codes[row_start : row_start + len(matrix)], self.weight_scale[first:end]
        self.drop_cached()
        return pack_(matrix, codes, scale, self.scales)

    def refuse(self, faults: Sequence[int], name: str) -> None:
        """Raise EngineError if the matrix has inf or NaN. Scales follow the weights, so nothing else can go wrong."""
        if faults[0]:
            raise EngineError(
                f"the update of {name} holds inf or NaN: lower optim.learning_rate, and resume from the last checkpoint"
            )

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + layout.CODES] = destination.pop(prefix + CODES)

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        """Load what a checkpoint calls `weight`, and make codes of another dtype an error, which torch would cast."""
        errors: list[str] = rest[-1]
        named = {name: state_dict[prefix + name] for name in layout.TENSORS if prefix + name in state_dict}
        self._scales = None
        try:
            if len(named) == len(layout.TENSORS):
                layout.check_tensors(named, prefix.rstrip("."))
            layout.check_values({n: t for n, t in named.items() if not t.is_meta}, prefix.rstrip("."))
        except CheckpointError as error:
            errors.append(str(error))
            return
        if layout.CODES in named:
            state_dict[prefix + CODES] = state_dict.pop(prefix + layout.CODES)
        if layout.SCALE in named:
            state_dict[prefix + layout.SCALE] = named[layout.SCALE].float()
        super()._load_from_state_dict(state_dict, prefix, *rest)


def joined(linears: Sequence[nn.Module]) -> FP8Tensor | None:
    """The weight that has the rows of `linears`, without a copy; None unless they follow one another in memory."""
    codes, scale = linears[0].weight_codes, linears[0].weight_scale
    rows = 0
    for linear in linears:
        if not isinstance(linear, FP8Linear) or not linear.rounds_input or linear.scales != linears[0].scales:
            return None
        block = rows // layout.BLOCK
        if rows % layout.BLOCK or not _is_row(codes, rows, linear.weight_codes):
            return None
        if not _is_row(scale, block, linear.weight_scale):
            return None
        rows += linear.out_features
    if len(linears) == 1:
        return FP8Tensor(codes, scale)
    whole = codes.as_strided((rows, codes.shape[1]), codes.stride())
    return FP8Tensor(whole, scale.as_strided((layout.blocks(rows), scale.shape[1]), scale.stride()))


def _is_row(first: torch.Tensor, row: int, other: torch.Tensor) -> bool:
    """Whether `other` begins at that row behind the start of `first`, in the same storage."""
    same = first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and first.storage_offset() + row * first.stride(0) == other.storage_offset()


def kernel_takes(x: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether vLLM's kernels multiply x (T, in) by codes (out, in): 16-bit inputs, whole groups, rows in sixteens."""
    whole = not codes.shape[1] % layout.BLOCK and not codes.shape[0] % layout.KERNEL_ROWS
    return x.dtype in (torch.bfloat16, torch.float16) and whole and len(x) > 0


def decode(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`reference.dequantize_unchecked`, by our kernel on a card."""
    if not codes.is_cuda:
        return reference.dequantize_unchecked(codes, scale, dtype)
    from qerl.formats.fp8 import kernels

    return kernels.dequantize(codes, scale, dtype)


def pack_(matrix: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """Overwrite codes and scales as `reference.quantize` gives them, and return `reference.faults`, without a wait."""
    if matrix.is_cuda:
        from qerl.formats.fp8 import kernels

        return kernels.pack_(matrix.contiguous(), codes, scale, scales)
    tensors = reference.quantize_unchecked(matrix, scales)
    codes.copy_(tensors.codes)
    scale.copy_(tensors.scale)
    return reference.faults(matrix)


def packed(matrix: torch.Tensor, scales: ScaleKind) -> FP8Tensor:
    """`reference.quantize_unchecked` of a matrix (out, in); on a card by our kernel, which makes no wider copy."""
    if not matrix.is_cuda:
        return reference.quantize_unchecked(matrix, scales)
    rows, columns = matrix.shape
    codes = torch.empty(rows, columns, dtype=E4M3, device=matrix.device)
    scale = torch.empty(layout.blocks(rows), layout.blocks(columns), device=matrix.device)
    pack_(matrix, codes, scale, scales)
    return FP8Tensor(codes, scale)
