"""Products with the engine's NVFP4 weights, y = base(x) + (x A^T) B^T, in the way that suits the number of tokens.

`qerl.formats.nvfp4.ways` chooses the way. Weights in our own layout are multiplied by `gemm.py`, weights in a layout of
vLLM's by the kernel that it belongs to, and either can also be decoded and multiplied by cuBLAS.

Humming 0.1.10 is not used above 512 tokens: from four row blocks on (544 tokens) it runs clusters that multicast the
activations, and its products are then off by 2 to 4%, differently at each call. It never gets 49 to 56 tokens either,
because its blocks of 56 are off by 26%. Both were measured on an H200. Remove these limits once
scripts/bench/bench_gemm.py shows no such error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from qerl.engine.vllm.fp8 import HELD
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.nvfp4 import gemm, lora, tiling
from qerl.formats.nvfp4.activations import Activations
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.kernels import decode_
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.ways import Shape, way_of

HUMMING_WRONG = range(49, 57)  # numbers of tokens for which it would take one block of 56


@dataclass
class Base:
    """What a quantized product needs to know of its linear, besides its arguments."""

    method: LinearMethodBase
    layer: torch.nn.Module
    weight: KernelWeight
    adapter: Adapter | None
    activations: Activations | None = None
    ways: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ways = self.shape.ways({})

    @property
    def shape(self) -> Shape:
        ranks = 0 if self.adapter is None else self.adapter.a.shape[0]
        fused = self.weight.layout is QERL and (self.adapter is None or self.adapter.fits_kernels)
        return Shape(self.weight.out_features, self.weight.in_features, ranks, self.weight.layout.name, fused)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied for rows x (tokens, in): contiguous, and rounded if the linear rounds its input."""
        x = x.contiguous()
        return x if self.activations is None else self.activations(x)


def adapter_of(layer: LinearBase) -> Adapter | None:
    """The adapter in the layer's buffers; None in an engine without an adapter."""
    if not hasattr(layer, "lora_a"):
        return None
    return Adapter(layer.lora_a, layer.lora_b, tuple(layer.output_partition_sizes))


# The key is the address of the kernel's words. A name or a scale would be a constant in the compiled graphs, and equal
# layers whose graphs differ in a constant would be compiled one by one.
BASES: dict[int, Base] = {}


def forget_bases() -> None:
    """Drop all references to an engine's weights. The process may open another engine at the same addresses."""
    BASES.clear()
    HELD.clear()
    _LOADED.clear()
    gemm.forget_work_space()


@torch.library.custom_op("qerl::nvfp4_linear", mutates_args=())
def nvfp4_linear(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """x W^T + bias, (tokens, in) -> (tokens, rows). Compilers do not look inside."""
    base = BASES[words.data_ptr()]
    return WAYS[way_of(base.ways, x.shape[0])](base, base.input(x), bias, None)


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
    """x W^T + bias + (x A^T) B^T. A and B are those of `BASES`; as arguments they tell compilers what is read."""
    base = BASES[words.data_ptr()]
    return WAYS[way_of(base.ways, x.shape[0])](base, base.input(x), bias, base.adapter)


@nvfp4_lora_linear.register_fake
def _(x, words, bias, lora_a, lora_b, rows):
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("qerl::add_lora", mutates_args=())
def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    parts: list[int],
) -> torch.Tensor:
    """out + (x A^T) B^T for a 16-bit base."""
    return lora.add_adapter_(out.clone(), x.contiguous(), Adapter(lora_a, lora_b, tuple(parts)))


@add_lora.register_fake
def _(out, x, lora_a, lora_b, parts):
    return torch.empty_like(out)


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
    has one; `kernel_choice.compile_ahead` has already started the compilation. Kernels that are chosen only later
    (`tune.choose_ways_`) are loaded when vLLM runs each size once before its capture.
    """
    base = BASES[layer.weight.data_ptr()] if layer.qerl_quantized else None
    adapter = adapter_of(layer)
    rows, columns = sum(layer.output_partition_sizes), layer.input_size  # of one card
    ranks = 0 if adapter is None else adapter.a.shape[0]
    shape = (rows, columns, ranks, None if base is None else base.weight.layout)
    if shape in _LOADED or not has_kernels(layer.weight.device):
        return
    _LOADED.add(shape)
    for tokens in tiling.TOKEN_TILES:
        x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device=layer.weight.device)
        if base is not None and base.weight.layout is QERL:
            WAYS[way_of(base.ways, tokens)](base, x, None, adapter)
        if adapter is not None:
            lora.add_adapter_(x.new_zeros(tokens, rows), x, adapter)
