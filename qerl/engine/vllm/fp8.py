"""vLLM linears with block-scaled FP8 weights, multiplied by vLLM's kernels, and what trainer and engine share of them.

The tensors stay as in the checkpoint, codes (out, in) and float32 scales, whatever the kernel: the trainer's linears
are rows of them (`view`), and a sync overwrites them in place. The trainer multiplies by the same function
(`qerl.formats.fp8.linear.PRODUCTS`). Of vLLM's kernels that is

1. on Hopper, DeepGEMM, the fastest at every size that was measured (docs/lab/fp8.md). It compiles a kernel of each
   shape for some numbers of tokens, 1 to 5 seconds each at first, and keeps them in vLLM's cache;
2. CUTLASS where DeepGEMM is not to be had (VLLM_USE_DEEP_GEMM=0, no CUDA compiler) or does not take a shape;
3. Triton on Ada.

Weights whose activations stay in 16 bits are decoded for each product. VLLM_USE_DEEP_GEMM_E8M0 plays no part.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    w8a8_triton_block_scaled_mm,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_block_fp8_supported
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.platforms import current_platform
from vllm.utils import deep_gemm

from qerl.base.errors import CheckpointError, EngineError
from qerl.formats import DEFAULT
from qerl.formats.fp8 import kernels, layout, reference
from qerl.formats.fp8 import linear as trainer
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.fp8.reference import FP8Tensor, ScaleKind
from qerl.formats.nvfp4 import lora

logger = logging.getLogger(__name__)

SHAPE = [layout.BLOCK, layout.BLOCK]
DEEP_GEMM_ROWS = 64  # of which DeepGEMM takes multiples
DEEP_GEMM_ALIGNED = 4  # tokens, at whose multiples DeepGEMM wants the scales of a group
TOKENS = 40  # of the check of a product, more than one tile of small batches
LARGEST_ERROR = 0.01  # rounding to bfloat16 leaves 0.002, inputs that are not rounded would make 0.03


class FP8BlockMethod(LinearMethodBase):
    """A linear with FP8 weights from an FP8 folder. `scale_name` is what the folder calls the scales."""

    def __init__(self, rounds_input: bool, scale_name: str) -> None:
        self.rounds_input, self.scale_name = rounds_input, scale_name

    @property
    def kernel(self) -> str:
        """What multiplies by the weights."""
        return f"{kernel_of_card()}_fp8" if self.rounds_input else "decoded_fp8"

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        layer.weight_block_size = SHAPE  # vLLM's loader of fused linears reads it
        rows, loader = sum(output_partition_sizes), attributes.get("weight_loader")
        layer.register_parameter("weight", create_fp8_weight_parameter(rows, input_size_per_partition, loader))
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, SHAPE, loader
        )
        layer.register_parameter(self.scale_name, scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scale = layer.weight.data, getattr(layer, self.scale_name).data
        try:
            layout.check_values({layout.CODES: codes, layout.SCALE: scale}, layer.prefix)
        except CheckpointError as error:
            raise EngineError(str(error)) from error
        delattr(layer, self.scale_name)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.qerl_scales = reference.scale_kind(scale)
        if self.rounds_input and codes.shape not in _CHECKED:
            check_product(codes, scale, layer.qerl_scales, layer.prefix)
            _CHECKED.add(codes.shape)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        inputs = layer.qerl_scales if self.rounds_input else None
        return linear_product(x, FP8Tensor(layer.weight, layer.weight_scale), inputs, bias)

    def apply_with_adapter(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same and the adapter's product, which reads x as it is, for a layer with its buffers."""
        x = x.contiguous()
        return lora.product_with_adapter(lambda: self.apply(layer, x), x, layer.qerl_adapter, bias)


def view(layer: LinearBase, start: int, rows: int, bias: torch.Tensor | None) -> FP8Linear:
    """A frozen linear of the trainer over some rows of the layer, which begin at a block."""
    first = start // layout.BLOCK
    codes, scale = layer.weight.data, layer.weight_scale.data
    linear = FP8Linear.from_tensors(
        codes[start : start + rows], scale[first : first + layout.blocks(rows)], bias, torch.bfloat16
    )
    linear.scales = layer.qerl_scales
    linear.rounds_input = layer.quant_method.inner.rounds_input
    return linear


def product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """x W^T (T, out) for x (T, in): the card's twin of `reference.product`, which does what no kernel takes."""
    if not trainer.kernel_takes(x, codes):
        with torch.autocast(x.device.type, enabled=False):
            return reference.product(x, FP8Tensor(codes, scale), scales)
    return multiply(kernel_of(x, codes), x, codes, scale, scales)


def multiply(kernel: str, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """`product` by one of vLLM's kernels."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if kernel == "deepgemm":
        out = x.new_empty(len(x), len(codes))
        rounded = kernels.quantize_input(x, scales, DEEP_GEMM_ALIGNED)
        deep_gemm.fp8_gemm_nt(rounded, (codes, scale), out, is_deep_gemm_e8m0_used=False)
        return out
    rounded = kernels.quantize_input(x, scales)
    if kernel == "cutlass":
        sides = {"scale_a": rounded.scale, "scale_b": scale.t(), "out_dtype": x.dtype}
        return ops.cutlass_scaled_mm(rounded.codes, codes.t(), **sides)
    return w8a8_triton_block_scaled_mm(rounded.codes, codes, rounded.scale, scale, SHAPE, x.dtype)


_CHECKED: set[torch.Size] = set()  # shapes whose product was compared in this process


def check_product(codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind, name: str) -> None:
    """Raise EngineError unless the card's product is the oracle's, for some tokens and the first rows of a weight."""
    rows = min(len(codes), 2 * layout.BLOCK)
    generator = torch.Generator(codes.device).manual_seed(0)
    x = torch.randn(TOKENS, codes.shape[1], device=codes.device, dtype=torch.bfloat16, generator=generator)
    first = FP8Tensor(codes[:rows], scale[: layout.blocks(rows)])
    found, right = product(x, codes, scale, scales)[:, :rows].float(), reference.product(x.float(), first, scales)
    if not (error := float((found - right).norm() / right.norm())) < LARGEST_ERROR:
        raise EngineError(
            f"{name}: vLLM's {kernel_of_card()} product in FP8 is wrong by {error:.1%} on this card, against the "
            f"decoded weights: train on another format (`qerl quantize --scheme {DEFAULT.name}`), and report this"
        )


def kernel_of(x: torch.Tensor, codes: torch.Tensor) -> str:
    """Which of vLLM's kernels multiplies x by these codes."""
    deep = x.dtype == torch.bfloat16 and not len(codes) % DEEP_GEMM_ROWS and kernel_of_card() == "deepgemm"
    return "deepgemm" if deep else _other_kernel()


@cache
def kernel_of_card() -> str:
    """deepgemm where it works, which is tried once; cutlass; or triton on a card for which CUTLASS's is not built."""
    if not (current_platform.is_device_capability(90) and deep_gemm.is_deep_gemm_supported()):
        return _other_kernel()
    x = torch.ones(DEEP_GEMM_ROWS, layout.BLOCK, device="cuda", dtype=torch.bfloat16)
    weight = reference.quantize(x)
    try:
        out = torch.empty(len(x), len(x), device="cuda", dtype=torch.bfloat16)
        rounded = kernels.quantize_input(x, "pow2", DEEP_GEMM_ALIGNED)
        deep_gemm.fp8_gemm_nt(rounded, weight, out, is_deep_gemm_e8m0_used=False)
        torch.cuda.synchronize()
    except Exception as problem:  # no compiler, or parts of it are missing
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        logger.warning("DeepGEMM does not work here, so CUTLASS multiplies in FP8, more slowly: %s", reason)
        return _other_kernel()
    return "deepgemm"


@cache
def _other_kernel() -> str:
    return "cutlass" if cutlass_block_fp8_supported() else "triton"


def linear_product(
    x: torch.Tensor, weight: FP8Tensor, inputs: ScaleKind | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + bias, (tokens, in) -> (tokens, out). `inputs` is the kind of x's scales; None: x stays in 16 bits."""
    if inputs is None:
        return F.linear(x, trainer.decode(*weight, x.dtype), bias)
    out = product(x, *weight, inputs)
    return out if bias is None else out.add_(bias)


trainer.PRODUCTS["cuda"] = product
