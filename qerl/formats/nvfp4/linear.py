"""The modules over NVFP4 weights: a checkpoint's linear, and linears and experts in the layout of an engine's kernel.

`NVFP4Linear` holds the three tensors of `layout.py`.

`KernelLinear` is rows of a weight in a GEMM kernel's layout, decoded into a work buffer for each product. The buffer
holds code * block scale, which bfloat16 represents exactly; the rest of the scale, `KernelWeight.alpha`, multiplies the
float32 accumulator of the product, as it does in the kernels. So the products use the exact weights of the checkpoint,
not weights rounded to bfloat16. `place_in_kernel_layout_` makes such linears of a loaded model's.

`KernelExperts` are the experts of a layer in Marlin's layout, each a weight of its own with its own global scale. The
power of two that Marlin moves into the block scales is the same for all experts of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.base.errors import ENGINE, KERNEL, CheckpointError, EngineError
from qerl.formats.cuda.nvrtc import Launch, has_portable_kernels, kernel
from qerl.formats.fp8.training import Scaled
from qerl.formats.linear import PackedLinear, rounded_input
from qerl.formats.nvfp4 import kernel_layout, layout, reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import MARLIN, QERL, KernelWeight
from qerl.formats.nvfp4.layout import BLOCK
from qerl.formats.nvfp4.slab_layout import SLAB, UNIT

STORAGE = (torch.uint8, torch.float8_e4m3fn, torch.float32)  # dtypes of layout.TENSORS


class NVFP4Linear(PackedLinear):
    """See `PackedLinear`.

    Raises CheckpointError if in_features is not a multiple of 16, or if tensors do not fit when they are loaded.
    """

    @classmethod
    def from_tensors(
        cls,
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> NVFP4Linear:
        """See `PackedLinear.of_buffers`."""
        tensors = reference.NVFP4Tensor(packed, block_scale, global_scale).named()
        shape = layout.check_tensors(tensors)
        layout.check_values(tensors)
        return cls.of_buffers(tensors, shape, bias, compute_dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, global_scale: torch.Tensor | None = None) -> NVFP4Linear:
        """Quantize a dense linear as llm-compressor would; `global_scale` is as in `reference.quantize`."""
        packed = reference.quantize(linear.weight.detach(), global_scale)
        return cls.from_tensors(*packed, bias=linear.bias, compute_dtype=linear.weight.dtype)

    def empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        specs = layout.tensor_specs(self.out_features, self.in_features)
        tensors = {
            name: torch.zeros(spec.shape, dtype=dtype, device=device)
            for (name, spec), dtype in zip(specs.items(), STORAGE, strict=True)
        }
        tensors[layout.GLOBAL_SCALE].fill_(1.0)
        return tensors

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        tensors = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return reference.dequantize_unchecked(*tensors, dtype)

    @property
    def fixed_scale(self) -> float:
        """The global scale. It never changes, because captured CUDA graphs contain it as a number."""
        return float(self.weight_global_scale)

    def write_(self, matrix: torch.Tensor, row_start: int = 0) -> torch.Tensor:
        """See `PackedLinear.write_`: the bits equal `reference.quantize` with the fixed scale.

        The faults are as in `reference.faults`. A matrix with inf or NaN is not written.
        """
        matrix = matrix.to(self.weight_packed.device)
        faults = reference.faults(matrix, self.weight_global_scale)
        if not faults[0]:
            tensors = reference.quantize(matrix, self.weight_global_scale)
            rows = slice(row_start, row_start + len(matrix))
            self.weight_packed[rows].copy_(tensors.packed)
            self.weight_scale[rows].copy_(tensors.block_scale)
            self.drop_cached()
        return faults

    def refuse(self, faults: Sequence[int], name: str) -> None:
        """Raise EngineError if the matrix has inf or NaN, or has grown beyond the fixed scale."""
        unfit, saturated = faults
        if unfit:
            raise EngineError(
                f"the update of {name} holds inf or NaN: lower optim.learning_rate, and resume from the last checkpoint"
            )
        if saturated:
            raise EngineError(
                f"{saturated} of {self.out_features * self.in_features // layout.BLOCK} block scales of {name} "
                f"saturate: its weights have grown beyond the global scale {self.fixed_scale:g}, which is fixed for a "
                "run; quantize the base with more head room, or lower optim.learning_rate"
            )

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        """Load, but make scales of another dtype an error, which torch would cast silently, and NaN scales too."""
        errors: list[str] = rest[-1]
        for tensor_name, spec in layout.tensor_specs(self.out_features, self.in_features).items():
            tensor = state_dict.get(prefix + tensor_name)
            try:
                if tensor is not None:
                    layout.check_tensor(tensor, spec, prefix + tensor_name)
                    layout.check_values({} if tensor.is_meta else {tensor_name: tensor}, prefix.rstrip("."))
            except CheckpointError as error:
                errors.append(str(error))
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)


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
        """See `PackedLinear.bits`: the bits of all linears in the kernel's weight."""
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
                "cannot change: write %s, or %s",
                *(weight.layout.name, KERNEL.set_to("qerl"), ENGINE.set_to("transformers")),
            )
        self.drop_cached()
        if kernel_packs(weight, first, matrix):
            return pack_by_kernel_(weight, first, matrix)
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
        from qerl.formats.nvfp4.kernels import turn

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


WARPS = 4  # per block of the kernel that packs; each takes a unit of a slab
ALIGNMENT = 8  # bytes of the widest read
DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("MASTER_BF16",)}


def kernel_packs(weight: KernelWeight, row_start: int, matrix: torch.Tensor) -> bool:
    """Whether the kernel reads `matrix` (rows, in) and writes it to the rows of `weight` from row_start on.

    Rows must begin with a slab of 16, and end with one or with the weight.
    """
    end = row_start + len(matrix)
    return (
        weight.layout is QERL
        and has_portable_kernels(weight.words.device)
        and matrix.device == weight.words.device
        and matrix.dtype in DEFINES
        and matrix.is_contiguous()
        and matrix.data_ptr() % ALIGNMENT == 0
        and matrix.shape[1] == weight.in_features
        and matrix.shape[1] % BLOCK == 0
        and row_start % SLAB == 0
        and (end % SLAB == 0 or end == weight.out_features)
    )


def pack_by_kernel_(weight: KernelWeight, row_start: int, matrix: torch.Tensor) -> torch.Tensor:
    """Overwrite the rows of `weight` from row_start on by `matrix`, quantized as by `reference.quantize`, in place.

    Its limit is the time to read the matrix and to write the packed weight, 4.56 bytes per float32 weight. What does
    not fit is counted on the way: a check before would read every matrix twice.

    Call it only if `kernel_packs` says so. Returns `reference.faults` of the matrix, int32 (2,) on the card. Block
    scales that do not fit saturate, and inf and NaN give any code.
    """
    rows, columns = matrix.shape
    counts = torch.zeros(2, dtype=torch.int32, device=matrix.device)
    launch = Launch((-(-columns // (UNIT * WARPS)), -(-rows // SLAB), 1), 32 * WARPS)
    tensors = (matrix, weight.words, weight.scales, counts)
    arguments = (row_start // SLAB, rows, columns, float(weight.global_scale))
    kernel("pack.cu", "nvfp4_pack", DEFINES[matrix.dtype])(launch, *tensors, *arguments)
    return counts


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


def place_in_kernel_layout_(model: nn.Module, fused: Sequence[Sequence[str]]) -> int:
    """Replace NVFP4 linears by rows of weights in our layout; returns how many were replaced.

    `fused` has the names of linears of one module that read the same input, which become rows of one weight.

    Each group's own tensors are freed before the next is packed, so that at no time a second copy of the base exists.
    Nothing changes on a card without our kernels, nor in a model that does not compute in bfloat16.
    """
    changed = 0
    for parent in list(model.modules()):
        for names in fused:
            linears = [getattr(parent, name, None) for name in names]
            if not all(type(linear) is NVFP4Linear and linear.compute_dtype == torch.bfloat16 for linear in linears):
                continue
            if not has_portable_kernels(linears[0].weight_device):
                return changed
            for name, linear in zip(names, kernel_linears(linears), strict=True):
                setattr(parent, name, linear)
            changed += len(names)
    return changed


def kernel_linears(linears: Sequence[NVFP4Linear]) -> list[KernelLinear]:
    """The same linears over one weight in our layout, or over one each if their global scales or inputs differ."""
    alike = {(linear.fixed_scale, linear.activations, linear.in_features) for linear in linears}
    if len(alike) > 1:
        return [placed for linear in linears for placed in kernel_linears([linear])]
    codes = torch.cat([linear.weight_packed for linear in linears])
    scales = torch.cat([linear.weight_scale.view(torch.uint8) for linear in linears]).view(torch.float8_e4m3fn)
    words, laid_scales = slab_layout.pack(codes, scales)
    first, rows = linears[0], sum(linear.out_features for linear in linears)
    weight = KernelWeight(QERL, words, laid_scales, rows, first.in_features, first.fixed_scale)
    placed, start = [], 0
    for linear in linears:
        bias = None if linear.bias is None else linear.bias.detach()
        placed.append(KernelLinear(weight, start, linear.out_features, bias).train(linear.training))
        placed[-1].activations = linear.activations
        start += linear.out_features
    return placed


# Marlin's tiles: it takes multiples of these, or of the same two the other way round.
MARLIN_ROWS, MARLIN_COLUMNS = 64, 128


class KernelExperts(nn.Module):
    """W (experts, out_features, in_features), frozen; see `qerl.formats.experts`. It owns no tensor."""

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        shape: tuple[int, int, int],
        global_scale: torch.Tensor,
        scale_factor: float,
    ) -> None:
        """`words` int32 (experts, in / 16, 2 * out) and `scales` (experts, in / 16, out) of one byte are the kernel's
        own; `global_scale` float32 (experts,) is the checkpoint's."""
        super().__init__()
        self.experts, self.out_features, self.in_features = shape
        self.compute_dtype = torch.bfloat16
        self.words, self.scales, self.global_scale, self.scale_factor = words, scales, global_scale, scale_factor
        self._global_scales: list[float] = global_scale.tolist()

    @property
    def weight_device(self) -> torch.device:
        return self.words.device

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, bit-exact with compressed-tensors' decoding of the checkpoint."""
        out = torch.empty(self.experts, self.out_features, self.in_features, dtype=dtype, device=self.weight_device)
        if out.is_cuda:
            from qerl.formats.nvfp4.kernels import dequantize_experts_

            return dequantize_experts_(out, self)
        for expert in range(self.experts):
            out[expert] = self.dense_expert(expert, dtype)
        return out

    def dense_expert(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """W (out_features, in_features) of one expert, in plain torch."""
        tensors, shape = (self.words[expert], self.scales[expert]), (self.out_features, self.in_features)
        weight = KernelWeight(MARLIN, *tensors, *shape, self._global_scales[expert], self.scale_factor)
        return kernel_layout.dequantize(weight, dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, computed anew."""
        return self.unpack(dtype)

    def extra_repr(self) -> str:
        return f"{self.experts} x {self.out_features} x {self.in_features}, in the engine's layout"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KernelExperts:
        """Does nothing: the weights belong to the engine, so they neither move nor change dtype."""
        return self


def marlin_takes(hidden: int, width: int) -> bool:
    """Whether Marlin multiplies by experts of this size without padding them."""
    return hidden % MARLIN_COLUMNS == width % MARLIN_ROWS == 0 or hidden % MARLIN_ROWS == width % MARLIN_COLUMNS == 0


def expected_shapes(shape: tuple[int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of words and scales, for experts of `shape`."""
    experts, rows, columns = shape
    return (experts, columns // BLOCK, 2 * rows), (experts, columns // BLOCK, rows)
