"""A frozen linear over rows of an NVFP4 weight in a GEMM kernel's layout, decoded into a work buffer for each product.

The buffer holds code * block scale, which bfloat16 represents exactly; the rest of the scale, `KernelWeight.alpha`,
multiplies the float32 accumulator of the product, as it does in the kernels. So the products use the exact weights of
the checkpoint, not weights rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.base.errors import ENGINE, KERNEL, EngineError
from qerl.formats.fp8.training import Scaled
from qerl.formats.linear import rounded_input
from qerl.formats.nvfp4 import kernel_layout, pack, reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.linear import NVFP4Linear

_BUFFERS: dict[tuple[torch.device, int], torch.Tensor] = {}  # work buffers by device and stream, as bytes


class KernelLinear(NVFP4Linear):
    """A frozen linear over rows [row_start, row_start + out_features) of a kernel's weight. It owns no weight."""

    exact_dtype = torch.bfloat16

    def __init__(self, weight: KernelWeight, row_start: int, rows: int, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.in_features, rows
        self.compute_dtype = torch.bfloat16
        self.kernel_weight, self.row_start = weight, row_start
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight_device(self) -> torch.device:
        return self.kernel_weight.words.device

    def bits(self) -> list[torch.Tensor]:
        """See `PackedLinear.bits`: those of all linears in the kernel's weight."""
        return [self.kernel_weight.words, self.kernel_weight.scales]

    @property
    def fixed_scale(self) -> float:
        return self.kernel_weight.global_scale

    def write_(self, matrix: torch.Tensor, row_start: int = 0) -> torch.Tensor:
        """See `NVFP4Linear.write_`: this writes its rows of the words and block scales that the kernel reads.

        A product of ours may read its weight before the launch ahead of it has ended, so synchronize before the next.
        Raises EngineError for any layout but our own.
        """
        weight, matrix, first = self.kernel_weight, matrix.to(self.weight_device), self.row_start + row_start
        if weight.layout is not QERL:
            raise EngineError(
                "the %s kernel multiplies by factors that it took from the weights when they were loaded, so they "
                "cannot change: write %s (Hopper), or %s",
                *(weight.layout.name, KERNEL.set_to("qerl"), ENGINE.set_to("transformers")),
            )
        self.drop_cached()
        if pack.takes(weight, first, matrix):
            return pack.pack_(weight, first, matrix)
        faults = reference.faults(matrix, self._scale_tensor())
        if not faults[0]:
            tensors = reference.quantize(matrix, self._scale_tensor())
            slab_layout.pack_(weight.words, weight.scales, first, tensors.packed, tensors.block_scale)
        return faults

    def _scale_tensor(self) -> torch.Tensor:
        return torch.tensor([self.fixed_scale], device=self.weight_device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input.to(self.compute_dtype)
        input = rounded_input(input, self.activations) if self.activations else input
        return self.with_start(input, _KernelProduct.apply(input, self))

    def followed_by(self, others: Sequence[nn.Module]) -> bool:
        return adjacent([self, *others])

    def unscaled(self, dtype: torch.dtype, others: Sequence[nn.Module] = ()) -> tuple[torch.Tensor, float]:
        """See `PackedLinear.unscaled`. The matrix is in the work buffer of this device and stream."""
        weight, rows = self.kernel_weight, sum(linear.out_features for linear in (self, *others))
        out = _work_buffer(rows * weight.in_features, dtype, weight.words.device).view(rows, weight.in_features)
        return _decode_(out, weight, self.row_start, scaled=False), weight.alpha

    def turned_to_fp8(self, others: Sequence[nn.Module] = ()) -> Scaled | None:
        """See `PackedLinear.turned_to_fp8`: only our own layout on a card has a kernel for it.

        The scale is the least power of two under which no code times the weight's largest block scale saturates, times
        the weight's factor alpha.
        """
        weight = self.kernel_weight
        if weight.layout is not QERL or not weight.words.is_cuda or not self.followed_by(others):
            return None
        from qerl.formats.nvfp4.to_fp8_kernel import turn

        return Scaled(*turn(weight, self.row_start, sum(linear.out_features for linear in (self, *others))))

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.weight_device)
        return _decode_(out, self.kernel_weight, self.row_start, scaled=True)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KernelLinear:
        """Does nothing: the weights belong to the engine, so they neither move nor change dtype."""
        return self


def adjacent(linears: Sequence[nn.Module]) -> bool:
    """Whether these are rows of the same kernel weight, in order and without gaps."""
    if not all(isinstance(linear, KernelLinear) for linear in linears):
        return False
    end = linears[0].row_start
    for linear in linears:
        if linear.kernel_weight is not linears[0].kernel_weight or linear.row_start != end:
            return False
        end += linear.out_features
    return True


def release_work_buffers() -> None:
    """Free the memory of the work buffers. Call it before a rollout, which plans with the free memory."""
    _BUFFERS.clear()


def _decode_(out: torch.Tensor, weight: KernelWeight, row_start: int, scaled: bool) -> torch.Tensor:
    if out.is_cuda:
        from qerl.formats.nvfp4.kernels import decode_, dequantize_

        return dequantize_(out, weight, row_start) if scaled else decode_(out, weight, row_start)
    dense = kernel_layout.dequantize(weight, torch.float32)[row_start : row_start + len(out)]
    return out.copy_(dense if scaled else dense / weight.alpha)


def _work_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    size = numel * dtype.itemsize
    buffer = _BUFFERS.get((device, stream))
    if buffer is None or buffer.numel() < size:
        buffer = _BUFFERS.pop((device, stream), None)
        del buffer  # frees the smaller buffer before the larger one is allocated
        _BUFFERS[device, stream] = buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer[:size].view(dtype)


class _KernelProduct(torch.autograd.Function):
    """alpha * x W^T + b and its gradient to x. The weight is decoded in both directions instead of being saved."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, linear: KernelLinear) -> torch.Tensor:
        ctx.linear = linear
        matrix, alpha = linear.unscaled(linear.compute_dtype)
        return _product(x, matrix.t(), linear.bias, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        linear = ctx.linear
        grad_output = grad_output.to(linear.compute_dtype)
        matrix, alpha = linear.unscaled(linear.compute_dtype)
        return _product(grad_output, matrix, None, alpha), None


def _product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    addend, beta = (x.new_zeros(1), 0) if bias is None else (bias, 1)
    return torch.addmm(addend, rows, matrix, beta=beta, alpha=alpha).view(*x.shape[:-1], matrix.shape[1])
