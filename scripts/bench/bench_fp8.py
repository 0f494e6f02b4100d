#!/usr/bin/env python3
"""Products in FP8 at the sizes of a 7B, of decode steps and of training, and the kernels that round; writes JSON.

    python3 scripts/bench/bench_fp8.py --out benchmarks/fp8/products-7b.json

Decoding: microseconds of each linear by tokens, rounding the input and multiplying, in a CUDA graph over so many copies
of the weight that none is in the cache. The ways are vLLM's kernels after our rounding: that which the engine takes,
CUTLASS and Triton; vLLM's rounding and DeepGEMM; and decoding to bfloat16 for cuBLAS. The limit is one read of the
codes. Training: TFLOP/s of y, dx and dW of each linear, in bfloat16 and by the recipes of `train.fp8_recipe`, with what
they round. Kernels: GB/s read and written. The file is written after each row. A way that fails is reported with the
error's first line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.formats.fp8 import reference
from qerl.formats.fp8.linear import decode, packed
from qerl.formats.fp8.reference import E4M3, FP8Tensor
from qerl.formats.fp8.training import E5M2, Recipe, quantize_tensor, recipe_of, scaled_product
from scripts.bench.provenance import command, machine, require_card

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
Product = Callable[[torch.Tensor, FP8Tensor], torch.Tensor]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--trained-tokens", type=int, default=16384)
    parser.add_argument("--only", choices=("decoding", "training", "kernels"), help="one of the three parts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card("vllm")
    from scripts.bench.limits import copy_gb_per_s, matrix_tflops

    torch.manual_seed(0)
    rates = {"gb_per_s": copy_gb_per_s(), "tflops": matrix_tflops()}
    report: dict[str, Any] = {"command": command(), **machine(), **rates, "rows": []}
    for row in rows(arguments):
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=0) + "\n", encoding="utf-8")


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """All measurements, one after another."""
    import qerl.engine.vllm.fp8  # noqa: F401  it brings the card's product
    from scripts.bench.limits import seconds_of

    def wanted(part: str) -> bool:
        return arguments.only in (None, part)

    for way, product in ways().items() if wanted("decoding") else ():
        yield from decoding(way, product, arguments.tokens)
    for name, shape in SHAPES.items() if wanted("training") else ():
        yield from trained(name, shape, arguments.trained_tokens, seconds_of)
    if wanted("kernels"):
        yield from rounding(arguments.trained_tokens, seconds_of)
        yield from turned(SHAPES["gate_up"], seconds_of)


def decoding(way: str, product: Product, counts: Sequence[int]) -> Iterator[Row]:
    """Microseconds and the relative error of each linear by a number of tokens."""
    from qerl.formats.cuda.timing import cold_layers, graph_us

    for name, shape in SHAPES.items():
        weights = [packed(normal(shape), "pow2") for _ in range(cold_layers(shape[0] * shape[1]))]
        for tokens in counts:
            x = normal((tokens, shape[1]))
            right = reference.product(x.float(), weights[0])
            calls = [partial(product, x, weight) for weight in weights]
            found = tried(calls, right, lambda calls: graph_us(calls) / len(calls))
            yield {"decode": name, "tokens": tokens, "way": way, **found}


def normal(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).mul_(0.02).bfloat16()


def tried(calls: Sequence[Callable[[], torch.Tensor]], right: torch.Tensor, us: Callable[..., float]) -> Row:
    """Microseconds and the relative error of the first, or why there are none."""
    try:
        error = float((calls[0]().float() - right).norm() / right.norm())
        return {"us": round(us(calls), 2), "error": round(error, 5)}
    except Exception as problem:  # of a compiler, a launch or a missing package
        return {"failed": line_of(problem)}


def line_of(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]


def ways() -> dict[str, Product]:
    """The ways to multiply in a decode step, rounding the input included."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from qerl.engine.vllm import fp8

    def by(kernel: str) -> Product:
        def product(x: torch.Tensor, weight: FP8Tensor) -> torch.Tensor:
            return fp8.multiply(kernel, x, *weight, "pow2")

        return product

    def by_deep_gemm(x: torch.Tensor, weight: FP8Tensor) -> torch.Tensor:
        from vllm.utils.deep_gemm import fp8_gemm_nt

        out = x.new_empty(len(x), len(weight.codes))
        aligned = fp8_utils.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True
        )
        fp8_gemm_nt(aligned, tuple(weight), out, is_deep_gemm_e8m0_used=False)
        return out

    return {
        "engine": lambda x, weight: fp8.product(x, *weight, "pow2"),
        "cutlass": by("cutlass"),
        "triton": by("triton"),
        "decoded": lambda x, weight: x @ decode(*weight, x.dtype).t(),
        "deep_gemm, vLLM's rounding": by_deep_gemm,
    }


def trained(name: str, shape: tuple[int, int], tokens: int, seconds_of: Callable) -> Iterator[Row]:
    """TFLOP/s of the three products of a linear, by each way."""
    dense, x, grad = normal(shape), normal((tokens, shape[1])), normal((tokens, shape[0]))
    flops = 2 * tokens * shape[0] * shape[1]
    total = torch.zeros(shape, device=DEVICE)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "bf16": {
            "y": lambda: x @ dense.t(),
            "dx": lambda: grad @ dense,
            "dW": lambda: torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total),
        }
    }
    for recipe in (recipe_of("tensorwise"), recipe_of("tensorwise", "e4m3"), recipe_of("blockwise")):
        numbers = "e5m2" if recipe.gradients == E5M2 else "e4m3"
        calls[f"{recipe.name} {numbers}"] = of_recipe(recipe, dense, x, grad)
    codes, held = quantize_tensor(x), quantize_tensor(dense)
    calls["tensorwise, without rounding"] = {"y": lambda: scaled_product(codes, held, torch.bfloat16, fast=True)}
    for way, products in calls.items():
        for product, call in products.items():
            try:
                found: Row = {"tflops": round(flops / seconds_of(call) / 1e12, 1)}
            except Exception as problem:
                found = {"failed": line_of(problem)}
            yield {"train": name, "tokens": tokens, "product": product, "way": way, **found}


def of_recipe(
    recipe: Recipe, dense: torch.Tensor, x: torch.Tensor, grad: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The products of a recipe with what each of them rounds."""
    found: dict[str, Callable[[], object]] = {
        "y": lambda: recipe.output(x, recipe.weight(dense)),
        "dx": lambda: recipe.to_input(grad, recipe.turned(dense)),
    }
    return found if recipe.name == "blockwise" else {**found, "dW": lambda: recipe.to_weight(grad, x)}


def rounding(tokens: int, seconds_of: Callable) -> Iterator[Row]:
    """GB/s of the kernels that round a matrix, turn codes, pack and decode a weight."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    from qerl.formats.fp8 import kernels

    x = normal((tokens, SHAPES["down"][1]))
    weight = packed(x, "pow2")
    codes, wide = weight.codes, x.float()
    calls = {
        "inputs rounded": (lambda: kernels.quantize_input(x, "pow2"), 3),
        "inputs rounded by vLLM": (lambda: per_token_group_quant_fp8(x, 128, column_major_scales=True), 3),
        "rounded to e4m3": (lambda: kernels.round_matrix(x, E4M3), 5),  # one more read for the largest magnitude
        "rounded to e4m3, turned": (lambda: kernels.round_matrix(x, E4M3, plain=False, turned=16), 5),
        "rounded to e5m2, both ways": (lambda: kernels.round_matrix(x, E5M2, turned=16), 6),
        "codes turned": (lambda: kernels.turn(codes), 2),
        "codes turned by torch": (lambda: codes.view(torch.uint8).t().contiguous(), 2),
        "packed from bfloat16": (lambda: kernels.pack_(x, *weight, "pow2"), 3),
        "packed from float32": (lambda: kernels.pack_(wide, *weight, "pow2"), 5),
        "decoded to bfloat16": (lambda: kernels.dequantize(*weight, torch.bfloat16), 3),
    }
    for what, (call, bytes_of_each) in calls.items():
        yield {"kernel": what, "gb_per_s": round(bytes_of_each * x.numel() / seconds_of(call) / 1e9)}


def turned(shape: tuple[int, int], seconds_of: Callable) -> Iterator[Row]:
    """Microseconds from an NVFP4 weight to its transpose in e4m3, at once and by way of bfloat16, and GB/s of both."""
    from qerl.formats.fp8 import kernels
    from qerl.formats.nvfp4 import reference as nvfp4
    from qerl.formats.nvfp4 import slab_layout
    from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
    from qerl.formats.nvfp4.kernels import decode_, turn

    dense = normal(shape)
    scale = nvfp4.shared_global_scale([dense], "pow2", 2)
    tensors = nvfp4.quantize(dense, scale)
    weight = KernelWeight(QERL, *slab_layout.pack(tensors.packed, tensors.block_scale), *shape, float(scale))
    calls = {
        "NVFP4 to e4m3, turned": (lambda: turn(weight, 0, shape[0]), 1.625),  # block scales are read twice
        "NVFP4 to bfloat16 to e4m3, turned": (
            lambda: kernels.round_matrix(decode_(dense, weight), E4M3, plain=False, turned=16),
            7.5625,
        ),
    }
    for what, (call, bytes_of_each) in calls.items():
        seconds = seconds_of(call)
        rate = round(bytes_of_each * dense.numel() / seconds / 1e9)
        yield {"kernel": what, "us": round(1e6 * seconds, 1), "gb_per_s": rate}


if __name__ == "__main__":
    main()
