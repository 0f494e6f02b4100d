"""vLLM linears that carry one LoRA adapter in static buffers: y = base(x) + (x A^T) B^T, over any format's base.

vLLM's own LoRA serves many adapters, which costs time at every batch size; an RL run has one adapter. Its A and B are
in two buffers per linear. Captured CUDA graphs read them and a sync overwrites them in place, so nothing is captured
again. In a fused linear (q/k/v, gate/up) the A of the parts are stacked, and B is block-diagonal.

Products with NVFP4 weights are computed in the way that suits the number of tokens, by our kernel, by vLLM's kernel in
whose layout they lie, or decoded and by cuBLAS (`qerl.formats.nvfp4.ways`). However a kernel was chosen, its results
are compared with the decoded weight's (`choose_ways_`), and it is not used at sizes at which it is wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import PerTensorScaleParameter

from qerl.base.errors import KERNEL
from qerl.checkpoint.activations import INPUT_SCALE, check_served
from qerl.engine.vllm import CONFIG_KEY
from qerl.engine.vllm.fp8 import FP8BlockMethod
from qerl.engine.vllm.sync import parts
from qerl.formats.cuda.nvrtc import has_kernels, has_portable_kernels
from qerl.formats.nvfp4 import gemm, lora, portable, slab_layout, ways
from qerl.formats.nvfp4.activations import Activations
from qerl.formats.nvfp4.kernel_layout import (
    HUMMING_MMA,
    HUMMING_WGMMA,
    MARLIN,
    QERL,
    KernelLinear,
    KernelWeight,
    scales_marlin_drops,
)
from qerl.formats.nvfp4.kernels import decode_
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.ways import Shape, padded_rank, way_of


@dataclass(frozen=True)
class Options:
    """What the engine asks of the plugin, carried by vLLM's `additional_config`."""

    max_rank: int = 0  # of start and adapter together; 0: there is neither, and products cost nothing extra
    deterministic: bool = False
    kernel: str = ""  # "qerl": ours multiplies by NVFP4 weights; otherwise the one that vLLM chose (`linear_backend`)
    expert_rank: int = 0  # of the adapter on experts; 0: there is none
    shares_outer: bool = True  # whether that adapter has the factors that all experts share
    records_experts: bool = False  # whether the experts that are chosen are kept for each token

    @classmethod
    def current(cls) -> Options:
        return cls.of(get_current_vllm_config())

    @classmethod
    def of(cls, config: VllmConfig) -> Options:
        return cls(**(config.additional_config or {}).get(CONFIG_KEY, {}))


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
            layer.qerl_global_scale = global_scale.data.max().item()  # equal in all parts: `opening.check_folder`
            _warn_of_dropped_scales(layer)
        self.inner.process_weights_after_loading(layer)
        if self.options.deterministic and kernel_name(layer) == "humming":
            # Humming adds its stream-K slices in the order in which they finish; without stream-K the order is fixed.
            layer.compute_config = json.dumps({**json.loads(layer.compute_config), "use_batch_invariant": True})
        if self.options.max_rank:
            _add_adapter_buffers(layer, self.options.max_rank)
        layer.qerl_adapter = adapter_of(layer)
        layer.qerl_quantized = global_scale is not None
        if layer.qerl_quantized:
            layer.qerl_base = Base(self.inner, layer, kernel_weight(layer), layer.qerl_adapter, layer.qerl_activations)
            BASES.append(layer.qerl_base)
        load_kernels(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.qerl_quantized:
            return layer.qerl_base.product(x, bias, layer.qerl_adapter)
        if layer.qerl_adapter is None:
            return self.inner.apply(layer, x, bias)
        if isinstance(self.inner, FP8BlockMethod):
            return self.inner.apply_with_adapter(layer, x, bias)
        return lora.add_adapter_(self.inner.apply(layer, x, bias), x.contiguous(), layer.qerl_adapter)


@register_weight_loader_v2_supported_method
class KeptMethod(AdapterLinearMethod):
    """A linear that stays in 16 bits without an adapter: the router of experts, or a and b of linear attention."""

    def __init__(self, inner: LinearMethodBase, options: Options) -> None:
        super().__init__(inner, replace(options, max_rank=0))


def is_kept(prefix: str) -> bool:
    """Whether vLLM's linear of this name stays in 16 bits, in the families that qerl opens; see KeptMethod."""
    return prefix.rpartition(".")[2] in ("gate", "in_proj_ba")


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
    assert name == "marlin", f"vLLM chose its {name} kernel, although it was told another"
    weight, scales = layer.weight.data, layer.weight_scale.data
    # For bfloat16 vLLM stores 2^119 / (global scale * factor); the factor is a power of two (marlin_utils_fp4.py).
    factor = 2.0**119 / (layer.qerl_global_scale * layer.weight_global_scale.item())
    factor = 2.0 ** round(torch.tensor(factor, dtype=torch.float64).log2().item())
    return KernelWeight(MARLIN, weight, scales, in_features=in_features, scale_factor=factor, **common)


def _warn_of_dropped_scales(layer: LinearBase) -> None:
    if kernel_name(layer) == "marlin" and (dropped := scales_marlin_drops(layer.weight_scale.data)):
        logger.warning(
            "%s: Marlin takes %d of %d block scales, all under 2^-6, for zero, and sampler and trainer then both do; "
            "%s, or qerl, keeps them",
            layer.prefix,
            dropped,
            layer.weight_scale.numel(),
            KERNEL.set_to("humming"),
        )


def _add_adapter_buffers(layer: LinearBase, max_rank: int) -> None:
    sizes = adapter_sizes(layer)
    in_features = getattr(layer, "input_size_per_partition", layer.input_size)
    device = next(layer.parameters()).device
    rank = padded_rank(max_rank) * len(sizes)
    zeros = {"dtype": layer.params_dtype, "device": device}
    layer.register_buffer("lora_a", torch.zeros(rank, in_features, **zeros), persistent=False)
    layer.register_buffer("lora_b", torch.zeros(sum(sizes), rank, **zeros), persistent=False)


HUMMING_WRONG = range(49, 57)  # numbers of tokens for which it would take one block of 56


@dataclass
class Base:
    """What a product with a quantized weight needs to know of its linear."""

    method: LinearMethodBase
    layer: torch.nn.Module
    weight: KernelWeight
    adapter: Adapter | None
    activations: Activations | None = None
    ways: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ways = self.shape.ways()

    @property
    def shape(self) -> Shape:
        ranks = 0 if self.adapter is None else self.adapter.a.shape[0]
        ours = self.weight.layout is QERL
        fused = ours and (self.adapter is None or self.adapter.fits_kernels)
        name = "portable" if ours and not has_kernels(self.weight.words.device) else self.weight.layout.name
        return Shape(self.weight.out_features, self.weight.in_features, ranks, name, fused)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
        """x W^T + bias + (x A^T) B^T, (tokens, in) -> (tokens, out); x is rounded if the linear rounds inputs."""
        x = x.contiguous()
        x = x if self.activations is None else self.activations(x)
        return WAYS[way_of(self.ways, x.shape[0])](self, x, bias, adapter)


def adapter_of(layer: LinearBase) -> Adapter | None:
    """The adapter in the layer's buffers; None in an engine without an adapter."""
    if not hasattr(layer, "lora_a"):
        return None
    return Adapter(layer.lora_a, layer.lora_b, adapter_sizes(layer))


def adapter_sizes(layer: LinearBase) -> tuple[int, ...]:
    """The rows of each linear of the checkpoint that `layer` fuses; each has an A of its own."""
    return tuple(rows for _, _, rows in parts(layer.prefix, layer))


BASES: list[Base] = []  # of the open engine


def forget_bases() -> None:
    """Drop all references to an engine's weights, which would keep them on the card."""
    BASES.clear()
    _LOADED.clear()
    gemm.forget_work_space()


Way = Callable[[Base, torch.Tensor, torch.Tensor | None, Adapter | None], torch.Tensor]


def _fused(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    return gemm.split_product(x, base.weight, base.layer.qerl_bias, adapter)


def _by_kernel(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    if base.weight.layout is QERL:
        out = gemm.split_product(x, base.weight, base.layer.qerl_bias)
    else:
        out = _by_vllm(base, x, bias)
    return out if adapter is None else lora.add_adapter_(out, x, adapter)


def _by_vllm(base: Base, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tokens, wrong = x.shape[0], HUMMING_WRONG if base.weight.layout.name == "humming" else ()
    rows = F.pad(x, (0, 0, 0, HUMMING_WRONG.stop - tokens)) if tokens in wrong else x
    return base.method.apply(base.layer, rows, bias)[:tokens]


def _decoded(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    """The decoded weight is exact codes times block scales; the global scale multiplies the float32 accumulator."""
    weight, bias = base.weight, base.layer.qerl_bias
    dense = torch.empty(weight.out_features, weight.in_features, dtype=x.dtype, device=x.device)
    decode_(dense, weight)
    addend, beta = (x.new_empty(1), 0) if bias is None else (bias, 1)
    out = torch.addmm(addend, x, dense.t(), beta=beta, alpha=weight.alpha)
    return out if adapter is None else lora.add_adapter_(out, x, adapter)


WAYS: dict[str, Way] = {"fused": _fused, "kernel": _by_kernel, "decoded": _decoded}


_LOADED: set[tuple[object, ...]] = set()  # (rows, columns, ranks, layout) of linears whose kernels are loaded


def load_kernels(layer: LinearBase) -> None:
    """Compile and load the kernels that the CUDA graphs of a linear will record, and allocate their work space, because
    neither is possible during a capture.

    This is done for each number of tokens that our kernels are compiled for, with the linear's adapter if the engine
    has one; `opening.compile_ahead` has already started the compilation. Kernels that are chosen only later
    (`choose_ways_`) are loaded when vLLM runs each size once before its capture.
    """
    base = layer.qerl_base if layer.qerl_quantized else None
    adapter = layer.qerl_adapter
    rows, columns = sum(layer.output_partition_sizes), layer.input_size  # of one card
    ranks = 0 if adapter is None else adapter.a.shape[0]
    shape = (rows, columns, ranks, None if base is None else base.weight.layout)
    if shape in _LOADED or not has_portable_kernels(layer.weight.device):
        return
    _LOADED.add(shape)
    for tokens in sorted({*ways.TOKEN_TILES, *portable.STAGES}):
        x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device=layer.weight.device)
        if base is not None and base.weight.layout is QERL:
            WAYS[way_of(base.ways, tokens)](base, x, None, adapter)
        if adapter is not None:
            lora.add_adapter_(x.new_zeros(tokens, rows), x, adapter)


class QerlNvFp4LinearKernel(NvFp4LinearKernel):
    """Replaces the kernel that vLLM chose for a linear (`layers.QerlNVFP4Config`)."""

    def __init__(self) -> None:
        super().__init__(NvFp4LinearLayerConfig())

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if has_portable_kernels(torch.device("cuda", torch.cuda.current_device())):
            return True, None
        return False, "it needs a card from Ampere on"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the checkpoint's codes and block scales by ours; vLLM calls this for one linear at a time."""
        words, scales = slab_layout.pack(layer.weight.data, layer.weight_scale.data, layer.prefix)
        layer.weight = torch.nn.Parameter(words, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.qerl_base.product(x, bias, None)


TOKENS = 8


def check_rounding(bases: Iterable[Base]) -> None:
    """Run one linear of each shape as the model runs it. Raises EngineError unless it multiplies by rounded rows.

    vLLM leaves activations in 16 bits where the card has no 4-bit products, and says only that it may be slow.
    """
    checked: set[Shape] = set()
    for base in bases:
        if base.activations is None or base.shape in checked:
            continue
        checked.add(base.shape)
        layer, weight = base.layer, base.weight
        generator = torch.Generator(weight.words.device).manual_seed(0)
        x = torch.randn(TOKENS, weight.in_features, device=weight.words.device, generator=generator).bfloat16()
        dense = KernelLinear(weight, 0, weight.out_features, None).unpack(torch.float32)
        serve = partial(layer.quant_method.apply, layer, bias=getattr(layer, "bias", None))
        check_served(layer.prefix, serve, dense, layer.qerl_bias, x, base.activations)


CALLS = 3


def choose_ways_(sizes: Sequence[int]) -> None:
    """Check the ways of each base of `BASES` against the decoded weight, and leave out those that are wrong.

    `sizes` are the numbers of tokens at which Humming and Marlin are checked, as the CUDA graphs have them; our own
    kernel is checked at each of `ways.TOKENS`.

    Humming 0.1.10 is not used above 512 tokens: from four row blocks on (544 tokens) it runs clusters that multicast
    the activations, and its products are then off by 2 to 4%, differently at each call. It never gets 49 to 56 tokens
    either, because its blocks of 56 are off by 26%. Both were measured on an H200. Remove these limits once
    scripts/bench/bench_linear.py shows no such error.
    """
    shapes: dict[ways.Shape, list[Base]] = {}
    for base in BASES:
        shapes.setdefault(base.shape, []).append(base)
    for shape, bases in shapes.items():
        chosen = shape.ways()
        at = ways.TOKENS if shape.kernel in ("qerl", "portable") else sizes
        checked = [size for size in at if ways.way_of(chosen, size) == "kernel"]
        wrong = ways.wrong_sizes(shape.name, {size: _error(bases[0], "kernel", size) for size in checked})
        left_out = {ways.bucket(size) for size in wrong} | ways.unchecked(at)
        fused = [size for size in ways.TOKENS if shape.fits_fused(size)]
        errors = {size: _error(bases[0], "fused", size) for size in fused}
        wrong_fused = ways.wrong_sizes(shape.name, errors, "our product")
        for base in bases:
            base.ways = shape.ways(left_out, wrong_fused)
    torch.cuda.empty_cache()
    summary = ways.summary({shape: bases[0].ways for shape, bases in shapes.items()})
    logger.info("ways to multiply:\n%s", summary)


@torch.inference_mode()
def _error(base: Base, way: str, tokens: int) -> float:
    """A way's largest relative error against the decoded weight over CALLS calls; rounding gives 0.002 to 0.005."""
    generator = torch.Generator(device=base.weight.words.device).manual_seed(tokens)
    x = torch.randn(tokens, base.weight.in_features, device=base.weight.words.device, generator=generator).bfloat16()
    bias = getattr(base.layer, "bias", None)
    exact = WAYS["decoded"](base, x, bias, None).float()
    results = [WAYS[way](base, x, bias, None).float() for _ in range(CALLS)]
    return max(((result - exact).norm() / exact.norm().clamp_min(1e-30)).item() for result in results)
