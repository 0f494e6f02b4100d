"""Products with the engine's NVFP4 weights: y = base(x) + (x A^T) B^T, each call by the way that suits its tokens.

Which way is `qerl.nvfp4.ways`' to say. Humming 0.1.10 is not used above 512 tokens: from four row blocks on (544
tokens) it runs clusters that multicast the activations, and its products are then off by 2 to 4%, differently at each
call (measured on an H200). Remove that limit once scripts/bench_gemm.py shows no such error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from qerl.nvfp4 import small_batch
from qerl.nvfp4.kernel_layout import KernelWeight
from qerl.nvfp4.kernels import decode_
from qerl.nvfp4.lora import expand_
from qerl.nvfp4.ways import Shape, way_of

LORA_KERNEL_TOKENS = 512  # up to here the adapter has kernels of its own, above two cuBLAS products cost little

Adapter = tuple[torch.Tensor, torch.Tensor]  # A (ranks, in), B (out, ranks)


@dataclass
class Base:
    """What a quantized product needs of a linear beside its arguments."""

    method: LinearMethodBase
    layer: torch.nn.Module
    weight: KernelWeight
    parts: tuple[int, ...]  # rows of the fused linears
    ranks: int
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.ways = self.shape.ways({})

    @property
    def shape(self) -> Shape:
        fused = small_batch.has_kernels(self.weight.words.device)
        return Shape(self.weight.out_features, self.weight.in_features, self.ranks, self.weight.layout.name, fused)


# By address of the kernel's words: the compiled graphs of equal layers must not differ in a constant (a name, a scale),
# or each layer would be compiled on its own.
BASES: dict[int, Base] = {}


def forget_bases() -> None:
    """Let go of an engine's weights: the process may open another one, at the same addresses."""
    BASES.clear()


@torch.library.custom_op("qerl::nvfp4_linear", mutates_args=())
def nvfp4_linear(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """x W^T + bias, (tokens, in) -> (tokens, rows); opaque to compilers."""
    base = BASES[words.data_ptr()]
    return WAYS[way_of(base.ways, x.shape[0])](base, x.contiguous(), bias, None)


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
    """x W^T + bias + (x A^T) B^T."""
    base = BASES[words.data_ptr()]
    return WAYS[way_of(base.ways, x.shape[0])](base, x.contiguous(), bias, (lora_a, lora_b))


@nvfp4_lora_linear.register_fake
def _(x, words, bias, lora_a, lora_b, rows):
    return x.new_empty(x.shape[0], rows)


@torch.library.custom_op("qerl::add_lora", mutates_args=())
def add_lora(
    out: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, parts: list[int]
) -> torch.Tensor:
    """out + (x A^T) B^T for a 16-bit base."""
    return _add_lora_(out.clone(), x.contiguous(), (lora_a, lora_b), parts)


@add_lora.register_fake
def _(out, x, lora_a, lora_b, parts):
    return torch.empty_like(out)


Way = Callable[[Base, torch.Tensor, torch.Tensor | None, Adapter | None], torch.Tensor]


def _fused(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    if adapter is None:
        return small_batch.product(x, base.weight, base.layer.qerl_bias)
    hidden = small_batch.shrink(x, adapter[0])
    return small_batch.product(x, base.weight, base.layer.qerl_bias, hidden, adapter[1], base.parts)


def _by_kernel(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    out = base.method.apply(base.layer, x, bias)
    return out if adapter is None else _add_lora_(out, x, adapter, base.parts)


def _decoded(base: Base, x: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter | None) -> torch.Tensor:
    """Exact codes times block scales, the global scale on the float32 accumulator."""
    weight, bias = base.weight, base.layer.qerl_bias
    dense = torch.empty(weight.out_features, weight.in_features, dtype=x.dtype, device=x.device)
    decode_(dense, weight)
    addend, beta = (x.new_zeros(1), 0) if bias is None else (bias, 1)
    out = torch.addmm(addend, x, dense.t(), beta=beta, alpha=weight.alpha)
    return out if adapter is None else _add_lora_(out, x, adapter, base.parts)


WAYS: dict[str, Way] = {"fused": _fused, "kernel": _by_kernel, "decoded": _decoded}


def _add_lora_(out: torch.Tensor, x: torch.Tensor, adapter: Adapter, parts: Sequence[int]) -> torch.Tensor:
    """In place on `out`, which is ours and contiguous."""
    lora_a, lora_b = adapter
    if not _has_lora_kernels(x, parts):
        return out.addmm_(torch.mm(x, lora_a.t()), lora_b.t())
    return expand_(out, small_batch.shrink(x, lora_a), lora_b, parts)


def _has_lora_kernels(x: torch.Tensor, parts: Sequence[int]) -> bool:
    return x.shape[0] <= LORA_KERNEL_TOKENS and len(parts) <= 3 and small_batch.has_kernels(x.device)


@cache
def _loaded_shapes() -> set[tuple[int, ...]]:
    return set()


def load_kernels(layer: LinearBase) -> None:
    """Compile and load what the CUDA graphs will record: nothing may be loaded during a capture."""
    shape = (*layer.lora_b.shape, layer.lora_a.shape[1])
    if shape in _loaded_shapes() or not small_batch.has_kernels(layer.lora_a.device):
        return
    _loaded_shapes().add(shape)
    for tokens in (1, 16, 32, 64):
        x = layer.lora_a.new_zeros(tokens, layer.lora_a.shape[1])
        out = x.new_zeros(tokens, layer.lora_b.shape[0])
        if layer.qerl_quantized and way_of(BASES[layer.weight.data_ptr()].ways, tokens) == "fused":
            torch.ops.qerl.nvfp4_lora_linear(x, layer.weight, None, layer.lora_a, layer.lora_b, out.shape[1])
        _add_lora_(out, x, (layer.lora_a, layer.lora_b), tuple(layer.output_partition_sizes))
