"""vLLM linears that carry one LoRA adapter in static buffers: y = base(x) + (x A^T) B^T, over any format's base.

vLLM's own LoRA serves many adapters, which costs time at every batch size; an RL run has one adapter. Its A and B are
in two buffers per linear. Captured CUDA graphs read them and a sync overwrites them in place, so nothing is captured
again. In a fused linear (q/k/v, gate/up) the A of the parts are stacked, and B is block-diagonal. The products are in
`products.py`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import PerTensorScaleParameter

from qerl.base.errors import KERNEL, EngineError
from qerl.checkpoint.activations import INPUT_SCALE
from qerl.engine.vllm import fp8
from qerl.engine.vllm.fp8 import FP8BlockMethod
from qerl.engine.vllm.options import Options
from qerl.engine.vllm.products import BASES, Base, adapter_of, load_kernels
from qerl.formats.nvfp4.activations import Activations
from qerl.formats.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, QERL, KernelWeight, scales_marlin_drops
from qerl.formats.nvfp4.ranks import padded_rank

logger = logging.getLogger(__name__)


@register_weight_loader_v2_supported_method
class AdapterLinearMethod(LinearMethodBase):
    """Wraps vLLM's method for a linear: it keeps what the trainer needs and adds the adapter's product."""

    def __init__(self, inner: LinearMethodBase, options: Options, activations: str = "none") -> None:
        """`activations`: how the linear rounds its input."""
        self.inner = inner
        self.options = options
        self.activations = activations

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        weight_loader: Any = None,
        **kwargs: Any,
    ) -> None:
        sizes = (input_size_per_partition, output_partition_sizes, *sizes)
        self.inner.create_weights(layer, *sizes, weight_loader=weight_loader, **kwargs)
        if self.activations == "static":
            scales = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(INPUT_SCALE, PerTensorScaleParameter(data=scales, weight_loader=weight_loader))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.qerl_activations = _activations_of(layer, self.activations)
        bias = getattr(layer, "bias", None)
        layer.qerl_bias = None if bias is None else bias.data.clone()  # a kernel may permute its own
        global_scale = getattr(layer, "weight_global_scale", None)
        if global_scale is not None:
            # If the parts of a fused linear differ, vLLM takes the largest and only warns: the result would be wrong.
            scales = set(global_scale.data.flatten().tolist())
            if len(scales) != 1:
                raise EngineError(
                    f"{layer.prefix}: vLLM fuses linears that this checkpoint gives different global scales "
                    f"{sorted(scales)}; quantize it again with `qerl quantize`, which shares them"
                )
            layer.qerl_global_scale = scales.pop()
            _warn_of_dropped_scales(layer)
        self.inner.process_weights_after_loading(layer)
        if self.options.deterministic and kernel_name(layer) == "humming":
            # Humming adds its stream-K slices in the order in which they finish; without stream-K the order is fixed.
            layer.compute_config = json.dumps({**json.loads(layer.compute_config), "use_batch_invariant": True})
        if self.options.max_rank:
            _add_adapter_buffers(layer, self.options.max_rank)
        layer.qerl_quantized = global_scale is not None
        if layer.qerl_quantized:
            base = Base(self.inner, layer, kernel_weight(layer), adapter_of(layer), layer.qerl_activations)
            BASES[layer.weight.data_ptr()] = base
        elif isinstance(self.inner, FP8BlockMethod):
            fp8.hold(layer, adapter_of(layer))
        load_kernels(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = sum(layer.output_partition_sizes)
        if not self.options.max_rank:
            if layer.qerl_quantized:
                return torch.ops.qerl.nvfp4_linear(x, layer.weight, bias, rows)
            return self.inner.apply(layer, x, bias)
        if layer.qerl_quantized:
            return torch.ops.qerl.nvfp4_lora_linear(x, layer.weight, bias, layer.lora_a, layer.lora_b, rows)
        if isinstance(self.inner, FP8BlockMethod):
            return self.inner.apply_with_adapter(layer, x, bias)
        out = self.inner.apply(layer, x, bias)
        return torch.ops.qerl.add_lora(out, x, layer.lora_a, layer.lora_b, list(layer.output_partition_sizes))


@register_weight_loader_v2_supported_method
class RouterMethod(AdapterLinearMethod):
    """The router of a layer with experts: in 16 bits, without an adapter, and never trained."""

    def __init__(self, inner: LinearMethodBase, options: Options) -> None:
        super().__init__(inner, replace(options, max_rank=0))


def is_router(prefix: str) -> bool:
    """Whether vLLM's linear of this name is the router of a layer with experts, in the families that qerl opens."""
    return prefix.rpartition(".")[2] == "gate"


def kernel_name(layer: LinearBase) -> str:
    """The name of the kernel that multiplies by this linear's base weight."""
    inner, scheme = getattr(layer.quant_method, "inner", None), getattr(layer, "scheme", None)
    if isinstance(inner, FP8BlockMethod):
        return inner.kernel
    if scheme is None:
        return "cublas"
    return type(scheme.kernel).__name__.removesuffix("NvFp4LinearKernel").lower()


def _activations_of(layer: LinearBase, kind: str) -> Activations | None:
    """How a linear rounds its input. Parts with different scales get the largest, as in vLLM."""
    if kind != "static":
        return Activations() if kind == "dynamic" else None
    scale = getattr(layer, INPUT_SCALE).data.max().item()
    delattr(layer, INPUT_SCALE)
    return Activations(scale)


def kernel_weight(layer: LinearBase) -> KernelWeight:
    """The quantized weight of `layer`, in the tensors and the layout of its kernel."""
    name = kernel_name(layer)
    common = {"out_features": sum(layer.output_partition_sizes), "global_scale": layer.qerl_global_scale}
    in_features = getattr(layer, "input_size_per_partition", layer.input_size)
    if name == "qerl":
        return KernelWeight(QERL, layer.weight.data, layer.weight_scale.data, in_features=in_features, **common)
    if name == "humming":
        wgmma = "wgmma" in str(layer.humming_metas[""].mma_type).lower()
        layout = HUMMING_WGMMA if wgmma else HUMMING_MMA
        return KernelWeight(layout, layer.weight.data, layer.weight_scale.data, in_features=in_features, **common)
    if name == "marlin":
        weight, scales = layer.weight.data, layer.weight_scale.data
        # For bfloat16 vLLM stores 2^119 / (global scale * factor); the factor is a power of two (marlin_utils_fp4.py).
        factor = 2.0**119 / (layer.qerl_global_scale * layer.weight_global_scale.item())
        factor = 2.0 ** round(torch.tensor(factor, dtype=torch.float64).log2().item())
        return KernelWeight(MARLIN, weight, scales, in_features=in_features, scale_factor=factor, **common)
    raise EngineError(
        "vLLM chose its %s kernel for NVFP4, whose layout the trainer cannot read: write %s (a card of compute "
        "capability 8.0 or newer)",
        *(name, KERNEL.set_to("humming or marlin")),
    )


def _warn_of_dropped_scales(layer: LinearBase) -> None:
    if kernel_name(layer) == "marlin" and (dropped := scales_marlin_drops(layer.weight_scale.data)):
        logger.warning(
            "%s: Marlin takes %d of %d block scales, all under 2^-6, for zero, and sampler and trainer then both do; "
            "%s, or qerl on Hopper, keeps them",
            layer.prefix,
            dropped,
            layer.weight_scale.numel(),
            KERNEL.set_to("humming"),
        )


def _add_adapter_buffers(layer: LinearBase, max_rank: int) -> None:
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.output_size]
    in_features = getattr(layer, "input_size_per_partition", layer.input_size)
    device = next(layer.parameters()).device
    rank = padded_rank(max_rank) * len(sizes)
    zeros = {"dtype": layer.params_dtype, "device": device}
    layer.register_buffer("lora_a", torch.zeros(rank, in_features, **zeros), persistent=False)
    layer.register_buffer("lora_b", torch.zeros(sum(sizes), rank, **zeros), persistent=False)
