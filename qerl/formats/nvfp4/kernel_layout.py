"""NVFP4 weights in a GEMM kernel's layout: where each code and block scale is, and the linears and experts over them.

`KernelLinear` is rows of such a weight, decoded into a work buffer for each product. The buffer holds code * block
scale, which bfloat16 represents exactly; the rest of the scale, `KernelWeight.alpha`, multiplies the product's float32
accumulator, as it does in the kernels. So the products use the exact weights of the checkpoint, not weights rounded to
bfloat16. `place_in_kernel_layout_` makes such linears of a loaded model's. `KernelExperts` are a layer's experts in
Marlin's layout, each a weight of its own with its own global scale. The power of two that Marlin moves into the block
scales is the same for all experts of a projection. Our own layout is in `slab_layout.py`.

vLLM's Humming and Marlin kernels divide the weight (out, in) into tiles of 64 rows x 16 columns and store a tile as 32
lanes x 4 words of eight codes, in the order of a tensor-core fragment. Write row n and column k as

    n = 64 * tile + 16 * word + 8 * half + lane_hi        k = 16 * block + 8 * upper + 2 * lane_lo + odd

Then code (n, k) is in `words[block, 128 * tile + 4 * (4 * lane_hi + lane_lo) + word]`, at nibble
`4 * odd + 2 * upper + half` (Humming on wgmma, which transposes the 8 x 8 fragments) or `4 * odd + 2 * half + upper`.
Block scale (n, block) is in `scales[block, 64 * tile + 8 * lane_hi + n // 8 % 8]`. Marlin also swaps the middle two of
every four scales, and stores e4m3 as an unsigned number of 5 exponent and 3 mantissa bits.

Sources: humming-kernels 0.1.10 (`kernel/process.cuh`, `utils/weight.py`) and vllm 0.25.1 (`gptq_marlin_repack`,
`marlin_utils_fp4.py`). The GPU tests recover the same permutation by packing known codes with the kernels' own
packers. `qerl/formats/nvfp4/decode.py` and `kernels.py` are the fast twins of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.base.errors import ENGINE, KERNEL, EngineError
from qerl.formats.linear import rounded_input
from qerl.formats.nvfp4 import reference, slab_layout
from qerl.formats.nvfp4.layout import BLOCK, SCALE_MAX
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.formats.nvfp4.slab_layout import SLAB, UNIT

if TYPE_CHECKING:
    from qerl.formats.fp8.training import Scaled

TILE_ROWS = 64
WORDS_PER_TILE = 128


@dataclass(frozen=True)
class KernelLayout:
    """In which order one kernel reads codes and block scales."""

    name: str  # "qerl", "humming" or "marlin"
    transposed: bool = False  # nibble order: upper before half
    marlin_scales: bool = False  # scales are reordered, and re-encoded as Marlin's unsigned e5m3


QERL = KernelLayout("qerl")
HUMMING_WGMMA = KernelLayout("humming", transposed=True, marlin_scales=False)
HUMMING_MMA = KernelLayout("humming", transposed=False, marlin_scales=False)
MARLIN = KernelLayout("marlin", transposed=False, marlin_scales=True)


@dataclass(frozen=True)
class KernelWeight:
    """One (possibly fused) linear as its kernel keeps it; the tensors are the kernel's own, never copies.

    `words` is int32 (in_padded / 16, 2 * out_padded), `scales` has one byte per block scale (in_padded / 16,
    out_padded); in the QERL layout both are as `slab_layout.pack` returns them. The checkpoint's weight is code * block
    scale * `alpha`, where `alpha` is 1 / global scale, divided by the power of two that Marlin moves into its scales.
    """

    layout: KernelLayout
    words: torch.Tensor
    scales: torch.Tensor
    out_features: int
    in_features: int
    global_scale: float  # 448 * 6 / amax, as in the checkpoint
    scale_factor: float = 1.0  # the power of two that the stored block scales were multiplied by

    @property
    def alpha(self) -> float:
        """The factor that the product of the input and (code * stored block scale) still needs."""
        return 1.0 / (self.global_scale * self.scale_factor)


def codes(weight: KernelWeight) -> torch.Tensor:
    """The e2m1 codes (out_features, in_features), uint8."""
    if weight.layout is QERL:
        return slab_layout.codes(weight.words, weight.out_features, weight.in_features)
    n, k = _grid(weight, weight.in_features)
    lane = 4 * (n % 8) + k % 8 // 2
    column = WORDS_PER_TILE * (n // TILE_ROWS) + 4 * lane + n % TILE_ROWS // 16
    odd, upper, half = k % 2, k % 16 // 8, n % 16 // 8
    first, second = (upper, half) if weight.layout.transposed else (half, upper)
    words = weight.words[k // BLOCK, column]
    return (words >> (4 * (4 * odd + 2 * first + second)) & 15).to(torch.uint8)


def block_scales(weight: KernelWeight) -> torch.Tensor:
    """The stored block scales (out_features, in_features / 16), decoded to float32."""
    if weight.layout is QERL:
        return slab_layout.block_scales(weight.scales, weight.out_features, weight.in_features)
    n, block = _grid(weight, weight.in_features // BLOCK)
    group = n // 8 % 8
    if weight.layout.marlin_scales:
        group = (group & 4) | (group & 1) << 1 | group >> 1 & 1
    stored = weight.scales.view(torch.uint8)[block, TILE_ROWS * (n // TILE_ROWS) + 8 * (n % 8) + group]
    if not weight.layout.marlin_scales:
        return stored.view(torch.float8_e4m3fn).float()
    exponent, mantissa = stored.int() >> 3, stored.int() & 7
    return torch.where(stored == 0, 0.0, torch.ldexp(1 + mantissa.float() / 8, exponent - 22))


def dequantize(weight: KernelWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out_features, in_features), bit-exact with compressed-tensors' decoding of the checkpoint; slow."""
    from qerl.formats.nvfp4.reference import decode_e2m1

    scales = block_scales(weight) / weight.scale_factor
    # Dividing by a Python number would multiply by its reciprocal on CUDA, which rounds differently.
    scales = scales / torch.full_like(scales, weight.global_scale)
    values = decode_e2m1(codes(weight)).float() * scales.repeat_interleave(BLOCK, dim=1)
    return values.to(dtype)


def marlin_scale_factor(scales: torch.Tensor) -> float:
    """The power of two by which Marlin multiplies block scales (e4m3, any shape): the largest that keeps all of them at
    or below 448."""
    largest = scales.float().max()
    return float((SCALE_MAX / largest).log2().floor().exp2()) if largest > 0 else 1.0


def scales_marlin_drops(scales: torch.Tensor) -> int:
    """How many block scales (e4m3, of one fused linear) Marlin's encoding turns into 0, together with 16 weights each.

    It multiplies by `marlin_scale_factor`, and then sets those below 2^-6, the subnormals of e4m3, to zero.
    """
    values = scales.float()
    return int(((values > 0) & (values * marlin_scale_factor(scales) < 2**-6)).sum())


def _grid(weight: KernelWeight, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = weight.words.device
    return torch.arange(weight.out_features, device=device)[:, None], torch.arange(columns, device=device)[None]


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
        from qerl.formats.fp8.training import Scaled
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
    if weight.layout is not QERL or not weight.words.is_cuda:
        return False
    from qerl.formats.cuda.nvrtc import has_portable_kernels

    end = row_start + len(matrix)
    return (
        has_portable_kernels(weight.words.device)
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
    from qerl.formats.cuda.nvrtc import Launch, kernel

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
    dense = dequantize(weight, torch.float32)[row_start : row_start + len(out)]
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
    from qerl.formats.cuda.nvrtc import has_portable_kernels

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
        return dequantize(weight, dtype)

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
