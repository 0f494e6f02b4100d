"""vLLM linears that carry one LoRA adapter in static buffers: y = base(x) + (x A^T) B^T, over any format's base.

vLLM's own LoRA serves many adapters, which costs time at every batch size; an RL run has one adapter. Its A and B are
in two buffers per linear. Captured CUDA graphs read them and a sync overwrites them in place, so nothing is captured
again. In a fused linear (q/k/v, gate/up) the A of the parts are stacked, and B is block-diagonal. The products are in
`products.py`.

A checkpoint with 4-bit activations is opened as one with 16-bit ones, so that vLLM chooses no kernel by its own idea of
them (without 4-bit hardware it would leave them in 16 bits); the products round their input themselves.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.parameter import PerTensorScaleParameter

from qerl.checkpoint.activations import INPUT_SCALE
from qerl.errors import KERNEL, EngineError
from qerl.formats import BF16, FP8_BLOCK, NVFP4
from qerl.formats.fp8_block import OTHER_METHOD, rounds_input, unquantized_modules
from qerl.fp8.layout import SCALE
from qerl.nvfp4.activations import Activations
from qerl.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, QERL, KernelWeight, scales_marlin_drops
from qerl.nvfp4.ranks import padded_rank
from qerl.vllm_plugin import CONFIG_KEY, fp8
from qerl.vllm_plugin.fp8 import FP8BlockMethod
from qerl.vllm_plugin.kernel import QerlNvFp4LinearKernel
from qerl.vllm_plugin.products import BASES, Base, adapter_of, load_kernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What the engine asks of the plugin, carried by vLLM's `additional_config`."""

    max_rank: int = 0  # 0: there is no adapter, and products cost nothing extra
    deterministic: bool = False
    kernel: str = ""  # "qerl": ours multiplies by NVFP4 weights; otherwise the one that vLLM chose (`linear_backend`)

    @classmethod
    def current(cls) -> Options:
        return cls.of(get_current_vllm_config())

    @classmethod
    def of(cls, config: VllmConfig) -> Options:
        return cls(**(config.additional_config or {}).get(CONFIG_KEY, {}))


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


class ChosenByName:
    """A configuration that vLLM takes where its option `quantization` names `method`, whatever the checkpoint says."""

    method: ClassVar[str]

    def get_name(self) -> str:
        return self.method

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None):
        return cls.method if user_quant == cls.method else None


class OwnConfig(QuantizationConfig):
    """What vLLM asks of every configuration, for those that are not made from one of vLLM's."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


@register_quantization_config(NVFP4.vllm_method)
class QerlNVFP4Config(ChosenByName, CompressedTensorsConfig):
    """compressed-tensors' `nvfp4-pack-quantized`; each linear, quantized or not, has its adapter."""

    method = NVFP4.vllm_method
    activations = "none"  # how quantized linears round their input

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlNVFP4Config:
        groups = {name: {**group, "input_activations": None} for name, group in config["config_groups"].items()}
        made = super().from_config({**config, "config_groups": groups})
        made.activations = NVFP4.activations(config)
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = super().get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return method
        options = Options.current()
        scheme = getattr(layer, "scheme", None)
        if options.kernel == "qerl" and isinstance(getattr(scheme, "kernel", None), NvFp4LinearKernel):
            scheme.kernel = QerlNvFp4LinearKernel()
        return AdapterLinearMethod(method, options, "none" if scheme is None else self.activations)


@register_quantization_config(BF16.vllm_method)
class QerlBF16Config(OwnConfig):
    """A model that is not quantized; each linear has its adapter."""

    def get_name(self) -> str:
        return BF16.vllm_method

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlBF16Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return AdapterLinearMethod(UnquantizedLinearMethod(), Options.current())
        return None


@register_quantization_config(FP8_BLOCK.vllm_method)
class QerlFP8Config(ChosenByName, OwnConfig):
    """FP8 in blocks, as compressed-tensors or as DeepSeek and Qwen lay it out; each linear has its adapter."""

    method = FP8_BLOCK.vllm_method

    def __init__(self, rounds_input: bool, scale_name: str, unquantized: list[str]) -> None:
        super().__init__()
        self.rounds_input, self.scale_name, self.unquantized = rounds_input, scale_name, unquantized

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlFP8Config:
        others = config.get("quant_method") == OTHER_METHOD
        return cls(rounds_input(config), f"{SCALE}_inv" if others else SCALE, unquantized_modules(config))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        kept = should_ignore_layer(prefix, self.unquantized, self.packed_modules_mapping)
        method = UnquantizedLinearMethod() if kept else FP8BlockMethod(self.rounds_input, self.scale_name)
        return AdapterLinearMethod(method, Options.current())


def register() -> None:
    """Nothing is left to do: the decorators above have registered the methods on import."""


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
