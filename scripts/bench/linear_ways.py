"""The ways to multiply by the weight of a linear that scripts/bench/bench_linear.py compares, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from qerl.formats import NVFP4
from qerl.formats.cuda.nvrtc import has_kernels, has_portable_kernels
from qerl.formats.nvfp4 import gemm, lora, portable, reference, tuning
from qerl.formats.nvfp4.kernel_layout import KernelWeight
from qerl.formats.nvfp4.layout import BLOCK
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.ways import KERNEL_RIGHT, MAX_TOKENS, Shape, padded_rank
from qerl.plan.sizes import KNOWN, sizes_of

NAMES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Linear:
    """The sizes of one fused linear and its adapter."""

    name: str
    parts: tuple[int, ...]  # rows of each part
    columns: int
    part_rank: int

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def adapter_numbers(self) -> int:
        """How many numbers A and the blocks of B have."""
        return self.part_rank * (len(self.parts) * self.columns + self.rows)

    def shape(self, fused: bool) -> Shape:
        """The shape by which a way is chosen, for a weight in our own layout."""
        return Shape(self.rows, self.columns, self.part_rank * len(self.parts), "qerl", fused)

    def needs(self, way: str, tokens: int, adapter: bool) -> tuple[float, float]:
        """The bytes and the flops of a product that reads or writes each number once; weights are read as packed."""
        weight = 0 if way == "adapter" else self.rows * self.columns
        outs = 2 if way == "adapter" else 1  # "adapter" reads the output before it writes it
        numbers = tokens * (self.columns + outs * self.rows) + adapter * self.adapter_numbers
        flops = 2 * tokens * (weight + adapter * self.adapter_numbers)
        return 2 * numbers + weight * WAYS[way].weight_bytes, flops

    def limit(self, way: str, tokens: int, adapter: bool, limits: dict[str, float]) -> tuple[float, str]:
        """The fewest microseconds that the card can take, and whether bytes or flops set that limit."""
        size, flops = self.needs(way, tokens, adapter)
        return max((size / limits["gb_per_s"] / 1e3, "bytes"), (flops / limits["tflops"] / 1e6, "flops"))


def linears(shape: str, rank: int) -> list[Linear]:
    """The linears of a decoder layer of a known model."""
    fused = sizes_of(KNOWN[shape], shape).fused_linears()
    return [Linear(name, *of, padded_rank(rank)) for name, (_, *of) in zip(NAMES, fused, strict=True)]


@dataclass(frozen=True)
class Way:
    """One way to multiply.

    `make` makes a random weight for up to a number of tokens, `multiply` multiplies by it, `twin` does the same in
    float64 and without an adapter, and `runs` says whether the way can run for a linear and a number of tokens.
    """

    weight_bytes: float
    make: Callable[[Linear, int, str], Any]
    multiply: Callable[[Any, torch.Tensor, Adapter | None], torch.Tensor]
    twin: Callable[[Any, torch.Tensor], torch.Tensor]
    runs: Callable[[Linear, int], bool] = lambda linear, tokens: True


def random_adapter(linear: Linear, device: str) -> Adapter:
    return tuning.random_adapter(linear.parts, linear.columns, linear.part_rank, device)


def add_as_engine_(out: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """Add the adapter to the product of another kernel, as `qerl/engine/vllm/linear.py` does."""
    return out if adapter is None else lora.add_adapter_(out, x, adapter)


def _random_packed(linear: Linear, tokens: int, device: str) -> KernelWeight:
    return tuning.random_weight(linear.rows, linear.columns, device)


def _random_humming(linear: Linear, tokens: int, device: str) -> tuple[torch.nn.Module, reference.NVFP4Tensor]:
    packed = torch.randint(0, 256, (linear.rows, linear.columns // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0x60, 0x7F, (linear.rows, linear.columns // BLOCK), dtype=torch.uint8, device=device)
    tensors = reference.NVFP4Tensor(packed, scales.view(torch.float8_e4m3fn), torch.full((1,), 3e4, device=device))
    return _humming_layer(tensors), tensors


def _humming_layer(tensors: reference.NVFP4Tensor) -> torch.nn.Module:
    """A weight in the form that Humming takes, packed by vLLM."""
    from vllm.model_executor.layers.quantization.utils.humming_utils import prepare_humming_layer

    rows, half = tensors.packed.shape
    layer = torch.nn.Module()  # with the attributes that vLLM's packer requires of a linear
    layer.output_partition_sizes, layer.input_size_per_partition = [rows], 2 * half
    layer.output_size_per_partition = rows
    layer.params_dtype, layer.has_bias = torch.bfloat16, False
    for name, tensor in tensors.named().items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float"}
    prepare_humming_layer(layer, {**config, "num_bits": 4, "strategy": "group", "group_size": 16})
    return layer


def _random_dense(linear: Linear, tokens: int, device: str) -> torch.Tensor:
    return torch.randn(linear.rows, linear.columns, device=device, dtype=torch.bfloat16).mul_(0.02)


def _random_product(linear: Linear, tokens: int, device: str) -> torch.Tensor:
    return torch.randn(tokens, linear.rows, device=device, dtype=torch.bfloat16)


def _humming(weight: tuple[torch.nn.Module, Any], x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    from vllm.utils.humming import HummingMethod

    config = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "dense"}
    return add_as_engine_(HummingMethod.forward_layer(layer=weight[0], inputs=x, compute_config=config), x, adapter)


def _humming_twin(weight: tuple[Any, reference.NVFP4Tensor], x: torch.Tensor) -> torch.Tensor:
    return x.double() @ reference.dequantize_unchecked(*weight[1], torch.float32).double().t()


def _decoded(weight: KernelWeight, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    from qerl.formats.nvfp4.kernels import decode_

    dense = decode_(x.new_empty(weight.out_features, weight.in_features), weight)
    return add_as_engine_(torch.addmm(x.new_empty(1), x, dense.t(), beta=0, alpha=weight.alpha), x, adapter)


def product_of_ampere(
    x: torch.Tensor, weight: KernelWeight, bias: torch.Tensor | None = None, adapter: Adapter | None = None
) -> torch.Tensor:
    """`portable.product` by the code of compute capability 8.0, which the driver translates: to try it on a Hopper."""
    tiling = replace(portable.choose_tiling(weight.out_features, weight.in_features, len(x)), architecture="compute_80")
    return portable.product(x, weight, bias, adapter, tiling=tiling)


def _dense(weight: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    out = x @ weight.t()
    return out if adapter is None else out.addmm_(torch.mm(x, adapter.a.t()), adapter.b.t())


def _add(out: torch.Tensor, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    return out[: x.shape[0]] if adapter is None else lora.add_(out[: x.shape[0]], x, adapter)


def _has_kernels() -> bool:
    return has_kernels(torch.device("cuda", torch.cuda.current_device()))


WAYS = {
    "fused": Way(
        NVFP4.bytes_per_weight,
        _random_packed,
        lambda weight, x, adapter: gemm.split_product(x, weight, None, adapter),
        lambda weight, x: gemm.reference_product(x, weight),
        lambda linear, tokens: linear.shape(_has_kernels()).fits_fused(tokens),
    ),
    "portable": Way(
        NVFP4.bytes_per_weight,
        _random_packed,
        lambda weight, x, adapter: product_of_ampere(x, weight, None, adapter),
        lambda weight, x: gemm.reference_product(x, weight),
        lambda linear, tokens: tokens <= MAX_TOKENS and has_portable_kernels(torch.device("cuda", 0)),
    ),
    "humming": Way(
        NVFP4.bytes_per_weight,
        _random_humming,
        _humming,
        _humming_twin,
        lambda linear, tokens: find_spec("vllm") is not None and tokens <= KERNEL_RIGHT["humming"],
    ),
    "decoded": Way(
        NVFP4.bytes_per_weight, _random_packed, _decoded, lambda weight, x: gemm.reference_product(x, weight)
    ),
    "adapter": Way(
        0, _random_product, _add, lambda out, x: out[: x.shape[0]].double(), lambda linear, tokens: _has_kernels()
    ),
    "bf16": Way(2, _random_dense, _dense, lambda weight, x: x.double() @ weight.double().t()),
}
