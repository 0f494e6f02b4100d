#!/usr/bin/env python3
"""The product for cards from Ampere on (qerl/formats/nvfp4/portable.py), as a Hopper runs it, beside vLLM's Marlin.

    python3 scripts/bench/bench_portable.py --out benchmarks/portable/product.json

The kernel is compiled as code of compute capability 8.0, which the driver translates for the card. Every product of a
layer of a 7B is compared with its twin in float64 and called four times for equal bits. Then come microseconds in one
CUDA graph over layers that no cache holds: of each tiling for each linear, and of a layer in each way, with an adapter
of rank 32. `portable` has the fastest tiling of each linear, `portable default` the chosen ones; `bf16 merged` has the
adapter in its weights; "two products" adds it by cuBLAS. `larger` compares launches of 256 tokens with decoding.

benchmarks/portable/product.json was written by this script's first form, which named tilings in short and tried more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.formats.nvfp4 import gemm, lora, portable
from qerl.formats.nvfp4.decode import reference_decoded
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.portable import PortableTiling, choose_tiling
from scripts.bench.linear_ways import WAYS, Linear, add_as_engine_, linears, random_adapter
from scripts.bench.timing import cold_layers, graph_us

SHAPE, RANK, LAYERS = "qwen2.5-7b", 32, 8
TOKENS = (8, 16, 32, 48, 64, 96, 128, 192, 256)
LARGER = (320, 384, 512)

Call = Callable[[], object]
product = portable.product_of_ampere


def main() -> None:
    from scripts.bench.provenance import command, machine, require_card

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    require_card("vllm")
    torch.manual_seed(0)
    report: dict[str, Any] = {"command": command(), **machine(), "arch": portable.AMPERE}
    sizes = linears(SHAPE, RANK)
    report["correctness"] = [row for linear in sizes for row in checked(linear)]
    report["wrong"] = sum(not (row["error"] < 2.5e-3 and row["repeats"]) for row in report["correctness"])
    held = {linear.name: Held(linear) for linear in sizes}
    report["linears"], report["layers"] = [], []
    for tokens in TOKENS:
        rows = [row for each in held.values() for row in each.timed(tokens)]
        report["linears"] += [{key: str(value) for key, value in row.items()} for row in rows]
        report["layers"].append(layer(held, tokens, rows))
        print(report["layers"][-1], flush=True)
    report["larger"] = [larger(held, tokens) for tokens in LARGER]
    out.write_text(json.dumps(report, indent=0) + "\n", encoding="utf-8")


def tilings(linear: Linear, tokens: int) -> list[PortableTiling]:
    """The tiling that is chosen, then its neighbours that fit a card with little shared memory."""
    first = replace(choose_tiling(linear.rows, linear.columns, tokens), architecture=portable.AMPERE)
    others = [replace(first, in_loop=not first.in_loop), replace(first, beside=not first.beside)]
    others += [replace(first, batch=5), replace(first, stages=first.stages - 1)]
    return [each for each in dict.fromkeys([first, *others]) if each.stages > 1]


def checked(linear: Linear) -> list[dict[str, Any]]:
    """The error of products with and without an adapter, for each number of tokens, and whether four are equal."""
    weight, rows = WAYS["portable"].make(linear, 256, "cuda"), []
    dense = reference_decoded(weight).double() * weight.alpha
    for adapter in (None, random_adapter(linear, "cuda")):
        for tokens in (1, 3, *TOKENS):
            x = torch.randn(tokens, linear.columns, device="cuda").bfloat16()
            exact = x.double() @ dense.t()
            exact = exact if adapter is None else lora.reference_add(exact, x, adapter)
            outs = [product(x, weight, None, adapter) for _ in range(4)]
            error = ((outs[0].double() - exact).norm() / exact.norm()).item()
            same = all(torch.equal(outs[0], out) for out in outs[1:])
            rows.append({"linear": linear.name, "rank": RANK * (adapter is not None), "tokens": tokens})
            rows[-1] |= {"error": error, "repeats": same}
    return rows


class Held:
    """So many weights of a linear in each form, with adapters, that no cache holds them."""

    def __init__(self, linear: Linear) -> None:
        number = cold_layers(int(linear.needs("portable", 0, False)[0]))
        self.linear = linear
        self.weights = [WAYS["portable"].make(linear, 256, "cuda") for _ in range(number)]
        self.adapters = [random_adapter(linear, "cuda") for _ in range(number)]
        self.dense = [WAYS["bf16"].make(linear, 256, "cuda") for _ in range(2)]
        self.marlin = [marlin_layer(linear) for _ in range(number)]

    def timed(self, tokens: int) -> list[dict[str, Any]]:
        x, rows = self.input(tokens), []
        for tiling in tilings(self.linear, tokens):
            row: dict[str, Any] = {"tokens": tokens, "linear": self.linear.name, "tiling": tiling}
            for key, adapters in (("us", self.adapters), ("without_us", [None] * len(self.adapters))):
                pairs = zip(self.weights, adapters, strict=True)
                calls = [partial(portable.product, x, weight, None, adapter, None, tiling) for weight, adapter in pairs]
                row[key] = graph_us(calls) / len(calls)
            rows.append(row)
        return rows

    def input(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.linear.columns, device="cuda").bfloat16()


def layer(held: dict[str, Held], tokens: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds of a layer in each way."""
    best = {name: min((r for r in rows if r["linear"] == name), key=lambda r: r["us"])["tiling"] for name in held}
    inputs = {name: each.input(tokens) for name, each in held.items()}

    def way(make: Callable[[Held, torch.Tensor, int], Call]) -> float:
        calls = [make(each, inputs[name], at) for at in range(LAYERS) for name, each in held.items()]
        return graph_us(calls) / LAYERS

    def ours(call: Callable[..., torch.Tensor], fastest: bool = False, adapted: bool = True) -> float:
        def make(each: Held, x: torch.Tensor, at: int) -> Call:
            tiled = {"tiling": best[each.linear.name]} if fastest else {}
            return partial(call, x, pick(each.weights, at), None, pick(each.adapters, at) if adapted else None, **tiled)

        return way(make)

    def beside(base: Callable[[Held, torch.Tensor, int], torch.Tensor], add: Callable[..., torch.Tensor]) -> float:
        return way(lambda each, x, at: lambda: add(base(each, x, at), x, pick(each.adapters, at)))

    return {
        "tokens": tokens,
        "rank": RANK,
        "tilings": {name: str(tiling) for name, tiling in best.items()},
        "portable": ours(portable.product, fastest=True),
        "portable default": ours(product),
        "portable, no adapter": ours(portable.product, fastest=True, adapted=False),
        "gemm.cu": ours(gemm.product),
        "bf16 merged": beside(by_cublas, nothing),
        "bf16 + two products": beside(by_cublas, two_products),
        "marlin": beside(by_marlin, nothing),
        "marlin + two products": beside(by_marlin, two_products),
        "marlin + our adapter": beside(by_marlin, add_as_engine_),
    }


def larger(held: dict[str, Held], tokens: int) -> dict[str, Any]:
    """Launches of 256 tokens, and the weight decoded for cuBLAS."""
    line: dict[str, Any] = {"tokens": tokens}
    for name in ("qkv", "gate_up"):
        each = held[name]
        x, pairs = each.input(tokens), list(zip(each.weights, each.adapters, strict=True))
        ways = {"split": by_launches, "decoded": WAYS["decoded"].multiply}
        line[name] = {key: graph_us([partial(way, *pair[:1], x, pair[1]) for pair in pairs]) / len(pairs)
                      for key, way in ways.items()}  # fmt: skip
    return line


def by_launches(weight: Any, x: torch.Tensor, adapter: Adapter) -> None:
    for some in x.split(256):
        product(some, weight, None, adapter)


def pick(some: list[Any], at: int) -> Any:
    return some[at % len(some)]


def by_cublas(each: Held, x: torch.Tensor, at: int) -> torch.Tensor:
    return x @ pick(each.dense, at).t()


def nothing(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    return out


def two_products(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    return out.addmm_(torch.mm(x, adapter.a.t()), adapter.b.t())


def marlin_layer(linear: Linear) -> torch.nn.Module:
    """A weight in the form that Marlin takes, packed by vLLM."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

    rows, columns = linear.rows, linear.columns
    made = torch.nn.Module()
    made.output_size_per_partition, made.input_size_per_partition, made.params_dtype = rows, columns, torch.bfloat16
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x60, 0x7F, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    for name, tensor in (("weight", packed), ("weight_scale", scales.view(torch.float8_e4m3fn))):
        setattr(made, name, torch.nn.Parameter(tensor, requires_grad=False))
    made.weight_global_scale = torch.nn.Parameter(torch.tensor([1 / 3e4], device="cuda"), requires_grad=False)
    prepare_fp4_layer_for_marlin(made)
    return made


def by_marlin(each: Held, x: torch.Tensor, at: int) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

    made = pick(each.marlin, at)
    return apply_fp4_marlin_linear(
        input=x,
        weight=made.weight,
        weight_scale=made.weight_scale,
        weight_global_scale=made.weight_global_scale,
        workspace=made.workspace,
        size_n=made.output_size_per_partition,
        size_k=made.input_size_per_partition,
    )


if __name__ == "__main__":
    main()
