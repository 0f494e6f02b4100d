"""FP8 recipes of training: what rounds the products of a linear and of its gradients to 8 bits, in the trainer alone.

For x (T, in), a weight W (out, in) and the gradient dy (T, out):

    recipe      y = x W^T                     dx = dy W                      dW = dy^T x
    tensorwise  one scale for each matrix     one scale for each matrix      one scale for each matrix
    blockwise   x in groups of 128 per token, W in blocks of 128 x 128, dy in groups of 128 per token; dW in 16 bits

These are the recipes that NeMo RL and Megatron call `fp8_recipe`. Sums are in float32. Weights and inputs are e4m3;
gradients are e4m3, or e5m2 under `hybrid`. A recipe may leave y alone and round dx and dW only, so that the forward
pass stays the engine's.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from qerl.formats.fp8 import reference
from qerl.formats.fp8.layout import BLOCK
from qerl.formats.fp8.linear import PRODUCTS, decode, packed
from qerl.formats.fp8.reference import E4M3, LEAST_INPUT, FP8Tensor, ScaleKind

E5M2 = torch.float8_e5m2
ALIGNED = 16  # columns and rows of a weight, and the summed side, of torch._scaled_mm


class Scaled(NamedTuple):
    """A matrix (rows, columns) in 8 bits, codes * scale, with a float32 scale ().

    `quantize_tensor` gives a power of two; for an NVFP4 weight it includes the global scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor


def quantize_tensor(x: torch.Tensor, dtype: torch.dtype = E4M3, turned: bool = False) -> Scaled:
    """x (rows, columns) with one scale, the least power of two under which nothing saturates.

    Codes are rounded to even, once. A matrix that holds inf or NaN gets codes that are NaN. `turned`: the transpose of
    x, since products on a card sum along neighbours.
    """
    codes, other, scale = round_matrix(x, dtype, plain=not turned, turned=int(turned))
    return Scaled(other if turned else codes, scale)


class Both(NamedTuple):
    """A matrix (rows, columns) in 8 bits and its transpose, whose rows are filled up by zeros to what a card's products
    take; they have the same codes and scale. None: not asked for, or freed."""

    plain: Scaled | None
    turned: Scaled | None


def round_matrix(
    x: torch.Tensor, dtype: torch.dtype, plain: bool, turned: int, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """See `qerl.formats.fp8.kernels.round_matrix`, whose twin this is."""
    if x.is_cuda:
        from qerl.formats.fp8 import kernels

        return kernels.round_matrix(x if x.stride(1) == 1 else x.contiguous(), dtype, plain, turned, largest)
    # The norm is the largest magnitude, found without a tensor of magnitudes.
    amax = torch.linalg.vector_norm(x, torch.inf).float() if largest is None else largest.view(torch.float32)
    scale = tensor_scale(amax, dtype)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = (x * scale.reciprocal().to(x.dtype)).to(dtype)
    if not turned:
        return codes, None, scale
    other = F.pad(_transposed(codes).view(torch.uint8), (0, -len(x) % turned)).view(dtype)
    return codes if plain else None, other, scale


def tensor_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least power of two, float32 (), under which a magnitude of `amax` does not saturate."""
    amax = amax.clamp(min=LEAST_INPUT)
    return reference.ceil_pow2(amax / torch.full_like(amax, torch.finfo(dtype).max))


def scaled_product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """a b^T (M, N) in `dtype` for a (M, K) and b (N, K), summed in float32 and rounded once.

    `fast` lets a card sum with fewer bits, as Transformer Engine does in the forward pass alone.
    """
    if a.codes.is_cuda and not (len(b.codes) % ALIGNED or b.codes.shape[1] % ALIGNED):
        left, right = a.codes.contiguous(), b.codes.contiguous().t()
        scales = {"scale_a": a.scale, "scale_b": b.scale}
        return torch._scaled_mm(left, right, **scales, out_dtype=dtype, use_fast_accum=fast)
    left, right = a.codes.float(), b.codes.float()
    return (left @ right.t() * (a.scale * b.scale)).to(dtype)


@dataclass(frozen=True)
class Tensorwise:
    """One scale for each matrix. `gradients`: the dtype of dy.

    1. Scales are powers of two, by which values in 16 bits are divided without a rounding. Transformer Engine takes any
       float32 by default for whole tensors.
    2. A matrix's scale depends on all its rows, so a token's product depends on what is in its micro-batch.

    On a card the products are torch's `_scaled_mm`; on a CPU, and for sizes that the card's products do not take, both
    sides are decoded, which is exact.
    """

    gradients: torch.dtype = E5M2
    rounds_output: bool = True  # otherwise only dx and dW are rounded
    name = "tensorwise"
    product = staticmethod(scaled_product)
    one_scale = True  # for a whole matrix, so that dW can be rounded too, and a weight be turned by one kernel

    def weight(self, weight: FP8Tensor | torch.Tensor) -> Scaled:
        """What `output` multiplies by, of a dense matrix (out, in) or of codes in blocks."""
        return quantize_tensor(_dense(weight))

    def turned(self, weight: FP8Tensor | torch.Tensor) -> Scaled:
        """The same (in, out), which `to_input` multiplies by."""
        return quantize_tensor(_dense(weight), turned=True)

    def output(self, x: torch.Tensor, weight: Scaled) -> torch.Tensor:
        """y (T, out) in the dtype of x."""
        return scaled_product(quantize_tensor(x), weight, x.dtype, fast=True)

    def to_input(self, grad: torch.Tensor, turned: Scaled) -> torch.Tensor:
        """dx (T, in) in the dtype of dy."""
        return scaled_product(quantize_tensor(grad, self.gradients), turned, grad.dtype)

    def to_weight(self, grad: torch.Tensor, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """dW (out, in) in `dtype`."""
        return scaled_product(self.upstream(grad).turned, self.summed(x), dtype)

    def upstream(self, grad: torch.Tensor, largest: torch.Tensor | None = None, trains: bool = True) -> Both:
        """dy (T, out) as the product for dx takes it, and if W `trains`, for dW. `largest` as in `round_matrix`."""
        aligned = ALIGNED if trains else 0
        codes, turned, scale = round_matrix(grad, self.gradients, plain=True, turned=aligned, largest=largest)
        return Both(Scaled(codes, scale), Scaled(turned, scale) if trains else None)

    def summed(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> Scaled:
        """x (T, in) as the product for dW takes it: transposed, for all weights that read x."""
        return Scaled(*round_matrix(x, E4M3, plain=False, turned=ALIGNED, largest=largest)[1:])


@dataclass(frozen=True)
class Blockwise:
    """Groups of 128 per token, and blocks of 128 x 128: the product of the format FP8 itself.

    dW stays in 16 bits, where Transformer Engine rounds it in groups along the tokens: it is a third of the products of
    whole weights, and none of an adapter's. On a card the products are `qerl.formats.fp8.linear.PRODUCTS`.
    """

    rounds_output: bool = True  # otherwise only dx is rounded
    gradients = E4M3
    name = "blockwise"
    one_scale = False

    def weight(self, weight: FP8Tensor | torch.Tensor) -> FP8Tensor:
        """What `output` multiplies by, of a dense matrix (out, in) or of codes in blocks, which stay."""
        return packed(weight, "pow2") if isinstance(weight, torch.Tensor) else weight

    def turned(self, weight: FP8Tensor | torch.Tensor) -> FP8Tensor:
        """The same (in, out), which `to_input` multiplies by. Blocks are square, so codes keep their scales."""
        codes, scale = self.weight(weight)
        return FP8Tensor(_transposed(codes), scale.t().contiguous())

    def output(self, x: torch.Tensor, weight: FP8Tensor) -> torch.Tensor:
        """y (T, out) in the dtype of x."""
        return _product(x, weight)

    def to_input(self, grad: torch.Tensor, turned: FP8Tensor) -> torch.Tensor:
        """dx (T, in) in the dtype of dy."""
        return _product(grad, turned)


Recipe = Tensorwise | Blockwise


def recipe_of(name: Literal["tensorwise", "blockwise"], products: str = "all") -> Recipe:
    """The recipe of that name. `products`: `all`, or `gradients`, which leaves y as the base computes it."""
    rounds_output = products == "all"
    if name == "blockwise":
        return Blockwise(rounds_output)
    return Tensorwise(rounds_output=rounds_output)


def _product(x: torch.Tensor, weight: FP8Tensor, scales: ScaleKind = "pow2") -> torch.Tensor:
    """x W^T (T, out), both sides in blocks, by the card's product where there is one."""
    if (product := PRODUCTS.get(x.device.type)) is None:
        return reference.product(x, weight, scales)
    lacking = -x.shape[1] % BLOCK  # it takes whole groups alone; codes of zero bits are 0
    if lacking:
        codes = F.pad(weight.codes.view(torch.uint8), (0, lacking)).view(E4M3)
        return product(F.pad(x, (0, lacking)), codes, weight.scale, scales)
    return product(x, *weight, scales)


def _dense(weight: FP8Tensor | torch.Tensor) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    return decode(*weight, torch.bfloat16 if weight.codes.is_cuda else torch.float32)


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    """A transposed copy of 8-bit codes, as bytes, which every device can copy."""
    if codes.is_cuda:
        from qerl.formats.fp8 import kernels

        return kernels.turn(codes)
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
