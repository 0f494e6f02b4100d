"""vLLM linears that carry one LoRA adapter in static buffers: y = base(x) + (x A^T) B^T, for NVFP4 and 16-bit bases.

vLLM's own LoRA serves many adapters and pays for it at every batch size; an RL run has one. Its A and B live in two
buffers a linear, read by the captured CUDA graphs and overwritten in place by a sync, so nothing is recaptured. A fused
linear (q/k/v, gate/up) has the A of its parts under one another and a block-diagonal B.

A quantized base goes through its kernel up to `KERNEL_TOKENS` tokens a call. Above, the weight is decoded into a buffer
for cuBLAS, which is as fast or faster there (benchmarks/gemm-7b.json), and for Humming 0.1.10 it has to be: from four
row blocks on (544 tokens) it runs clusters that multicast the activations, and its products are then off by 2 to 4%,
differently at each call (measured on an H200). Remove Humming's limit once scripts/bench_gemm.py shows no such error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from qerl.errors import EngineError
from qerl.nvfp4 import small_batch
from qerl.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, KernelWeight, scales_marlin_drops
from qerl.nvfp4.kernels import decode_
from qerl.nvfp4.lora import RANK_STEP, expand_
from qerl.vllm_plugin import BF16_METHOD, CONFIG_KEY, NVFP4_METHOD

logger = logging.getLogger(__name__)

KERNEL_TOKENS = {"humming": 512, "marlin": 256}
LORA_KERNEL_TOKENS = 512  # up to here the adapter has kernels of its own, above two cuBLAS products cost little
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Options:
    """What the engine asks of the plugin, carried by vLLM's `additional_config`."""

    max_rank: int = 0  # 0: no adapter, and no cost of one
    deterministic: bool = False

    @classmethod
    def current(cls) -> Options:
        return cls(**(get_current_vllm_config().additional_config or {}).get(CONFIG_KEY, {}))


@register_weight_loader_v2_supported_method
class AdapterLinearMethod(LinearMethodBase):
    """vLLM's method for a linear, wrapped: keeps what the trainer needs and adds the adapter's product."""

    def __init__(self, inner: LinearMethodBase, options: Options) -> None:
        self.inner = inner
        self.options = options

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.inner.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        bias = getattr(layer, "bias", None)
        layer.qerl_bias = None if bias is None else bias.data.clone()  # kernels permute theirs
        global_scale = getattr(layer, "weight_global_scale", None)
        if global_scale is not None:
            # vLLM takes the largest of the fused parts; it only warns if they differ, and the result would be wrong.
            scales = set(global_scale.data.flatten().tolist())
            if len(scales) != 1:
                raise EngineError(
                    f"{layer.prefix}: vLLM fuses linears that this checkpoint gives different global scales "
                    f"{sorted(scales)}; quantize it again with `qerl quantize`, which shares them"
                )
            layer.qerl_global_scale = scales.pop()
            _warn_of_dropped_scales(layer)
        self.inner.process_weights_after_loading(layer)
        if self.options.deterministic and hasattr(layer, "compute_config"):
            # Humming adds up its stream-K slices in the order in which they finish; without stream-K there is one.
            layer.compute_config = json.dumps({**json.loads(layer.compute_config), "use_batch_invariant": True})
        layer.qerl_quantized = kernel_name(layer) != "cublas"
        if layer.qerl_quantized:
            parts = tuple(layer.output_partition_sizes)
            _BASES[layer.weight.data_ptr()] = _Base(self.inner, layer, kernel_weight(layer), parts)
        if self.options.max_rank:
            _add_adapter_buffers(layer, self.options.max_rank)
            _load_kernels(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = sum(layer.output_partition_sizes)
        if not self.options.max_rank:
            if layer.qerl_quantized:
                return torch.ops.qerl.nvfp4_linear(x, layer.weight, bias, rows)
            return self.inner.apply(layer, x, bias)
        if layer.qerl_quantized:
            return torch.ops.qerl.nvfp4_lora_linear(x, layer.weight, bias, layer.lora_a, layer.lora_b, rows)
        out = self.inner.apply(layer, x, bias)
        return torch.ops.qerl.add_lora(out, x, layer.lora_a, layer.lora_b, list(layer.output_partition_sizes))


@dataclass(frozen=True)
class _Base:
    """What a quantized product needs of a linear beside its arguments."""

    method: LinearMethodBase
    layer: torch.nn.Module
    weight: KernelWeight
    parts: tuple[int, ...]  # rows of the fused linears


# By address of the kernel's words: the compiled graphs of equal layers must not differ in a constant (a name, a scale),
# or each layer would be compiled on its own.
_BASES: dict[int, _Base] = {}


def forget_bases() -> None:
    """Let go of an engine's weights: the process may open another one, at the same addresses."""
    _BASES.clear()


@torch.library.custom_op("qerl::nvfp4_linear", mutates_args=())
def nvfp4_linear(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """x W^T + bias, (tokens, in) -> (tokens, rows), by the way that suits the number of tokens; opaque to compilers."""
    base = _BASES[words.data_ptr()]
    x = x.contiguous()
    if small_batch.suits(base.weight, x.shape[0]):
        return small_batch.product(x, base.weight, base.layer.qerl_bias)
    return _base_product(base, x, bias)


@nvfp4_linear.register_fake
def _(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("qerl::nvfp4_lora_linear", mutates_args=())
def nvfp4_lora_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """x W^T + bias + (x A^T) B^T; with few tokens, base and adapter in two launches that overlap."""
    base = _BASES[words.data_ptr()]
    x = x.contiguous()
    if small_batch.suits(base.weight, x.shape[0]):
        hidden = small_batch.shrink(x, lora_a)
        return small_batch.product(x, base.weight, base.layer.qerl_bias, hidden, lora_b, base.parts)
    return _add_lora_(_base_product(base, x, bias), x, lora_a, lora_b, base.parts)


@nvfp4_lora_linear.register_fake
def _(x, words, bias, lora_a, lora_b, rows):
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("qerl::add_lora", mutates_args=())
def add_lora(
    out: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, parts: list[int]
) -> torch.Tensor:
    """out + (x A^T) B^T for a 16-bit base."""
    return _add_lora_(out.clone(), x.contiguous(), lora_a, lora_b, parts)


@add_lora.register_fake
def _(out, x, lora_a, lora_b, parts):
    return torch.empty_like(out)


def _base_product(base: _Base, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.shape[0] <= KERNEL_TOKENS[base.weight.layout.name]:
        return base.method.apply(base.layer, x, bias)
    return decoded_product(x, base.weight, base.layer.qerl_bias)


def _add_lora_(
    out: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, parts: Sequence[int]
) -> torch.Tensor:
    """In place on `out`, which is ours and contiguous."""
    if not _has_lora_kernels(x, parts):
        return out.addmm_(torch.mm(x, lora_a.t()), lora_b.t())
    return expand_(out, small_batch.shrink(x, lora_a), lora_b, parts)


def _has_lora_kernels(x: torch.Tensor, parts: Sequence[int]) -> bool:
    return x.shape[0] <= LORA_KERNEL_TOKENS and len(parts) <= 3 and small_batch.has_kernels(x.device)


def decoded_product(x: torch.Tensor, weight: KernelWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by decoding the weight: exact codes times block scales, the global scale on the float32 accumulator."""
    dense = torch.empty(weight.out_features, weight.in_features, dtype=x.dtype, device=x.device)
    decode_(dense, weight)
    addend, beta = (x.new_zeros(1), 0) if bias is None else (bias, 1)
    return torch.addmm(addend, x, dense.t(), beta=beta, alpha=weight.alpha)


@register_quantization_config(NVFP4_METHOD)
class QerlNVFP4Config(CompressedTensorsConfig):
    """compressed-tensors `nvfp4-pack-quantized` (and its unquantized linears), each linear with its adapter."""

    def get_name(self) -> str:
        return NVFP4_METHOD

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None):
        return NVFP4_METHOD if user_quant == NVFP4_METHOD else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = super().get_quant_method(layer, prefix)
        return AdapterLinearMethod(method, Options.current()) if isinstance(layer, LinearBase) else method


@register_quantization_config(BF16_METHOD)
class QerlBF16Config(QuantizationConfig):
    """16-bit linears, each with its adapter."""

    def get_name(self) -> str:
        return BF16_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlBF16Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return AdapterLinearMethod(UnquantizedLinearMethod(), Options.current())
        return None


def register() -> None:
    """The decorators above registered on import."""


def parts(name: str, layer: LinearBase) -> list[tuple[str, int, int]]:
    """(base module name, first row, rows) of each linear that `layer` fuses; `name` is vLLM's module name."""
    parent, _, leaf = name.rpartition(".")
    leaves = PARTS.get(leaf, (leaf,))
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.output_size]
    rows, start = [], 0
    for part, size in zip(leaves, sizes, strict=True):
        rows.append((f"{parent}.{part}" if parent else part, start, size))
        start += size
    return rows


def kernel_name(layer: LinearBase) -> str:
    """What multiplies this linear's base weight."""
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return "cublas"
    return type(scheme.kernel).__name__.removesuffix("NvFp4LinearKernel").lower()


def kernel_weight(layer: LinearBase) -> KernelWeight:
    """The quantized weight of `layer` where its kernel keeps it."""
    name = kernel_name(layer)
    common = {"out_features": sum(layer.output_partition_sizes), "global_scale": layer.qerl_global_scale}
    in_features = getattr(layer, "input_size_per_partition", layer.input_size)
    if name == "humming":
        wgmma = "wgmma" in str(layer.humming_metas[""].mma_type).lower()
        layout = HUMMING_WGMMA if wgmma else HUMMING_MMA
        return KernelWeight(layout, layer.weight.data, layer.weight_scale.data, in_features=in_features, **common)
    if name == "marlin":
        weight, scales = layer.weight.data, layer.weight_scale.data
        # bfloat16: vLLM stores 2^119 / (global scale * factor), the factor a power of two (marlin_utils_fp4.py)
        factor = 2.0**119 / (layer.qerl_global_scale * layer.weight_global_scale.item())
        factor = 2.0 ** round(torch.tensor(factor, dtype=torch.float64).log2().item())
        return KernelWeight(MARLIN, weight, scales, in_features=in_features, scale_factor=factor, **common)
    raise EngineError(
        f"vLLM chose its {name} kernel for NVFP4, whose layout the trainer cannot read: write rollout.kernel=humming "
        "or marlin (a card of compute capability 8.0 or newer)"
    )


def _warn_of_dropped_scales(layer: LinearBase) -> None:
    if kernel_name(layer) == "marlin" and (dropped := scales_marlin_drops(layer.weight_scale.data)):
        logger.warning(
            "%s: Marlin takes %d of %d block scales, all under 2^-6, for zero, and sampler and trainer then both do; "
            "rollout.kernel=humming keeps them",
            layer.prefix,
            dropped,
            layer.weight_scale.numel(),
        )


@cache
def _loaded_shapes() -> set[tuple[int, ...]]:
    return set()


def _load_kernels(layer: LinearBase) -> None:
    """Compile and load what the CUDA graphs will record: nothing may be loaded during a capture."""
    shape = (*layer.lora_b.shape, layer.lora_a.shape[1])
    if shape in _loaded_shapes() or not small_batch.has_kernels(layer.lora_a.device):
        return
    _loaded_shapes().add(shape)
    for tokens in (1, 16, 32, 64):
        x = layer.lora_a.new_zeros(tokens, layer.lora_a.shape[1])
        out = x.new_zeros(tokens, layer.lora_b.shape[0])
        if layer.qerl_quantized and small_batch.suits(_BASES[layer.weight.data_ptr()].weight, tokens):
            torch.ops.qerl.nvfp4_lora_linear(x, layer.weight, None, layer.lora_a, layer.lora_b, out.shape[1])
        _add_lora_(out, x, layer.lora_a, layer.lora_b, tuple(layer.output_partition_sizes))


def _add_adapter_buffers(layer: LinearBase, max_rank: int) -> None:
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.output_size]
    in_features = getattr(layer, "input_size_per_partition", layer.input_size)
    device = next(layer.parameters()).device
    rank = -(-max_rank // RANK_STEP) * RANK_STEP * len(sizes)  # the kernels take 16 ranks at a time
    zeros = {"dtype": layer.params_dtype, "device": device}
    layer.register_buffer("lora_a", torch.zeros(rank, in_features, **zeros), persistent=False)
    layer.register_buffer("lora_b", torch.zeros(sum(sizes), rank, **zeros), persistent=False)
