#!/usr/bin/env python3
"""The four linears of a decoder layer: the time of each way to multiply, by number of tokens, without and with LoRA.

    python3 scripts/bench/bench_linear.py --shape qwen2.5-7b --rank 32 --out benchmarks/linear-7b-rank32.json

- fused: base and adapter in one launch (Hopper; between 256 and 512 tokens, one launch per 256)
- portable: the same by the kernel of other cards, as code of compute capability 8.0 (up to 256 tokens)
- humming: vLLM's Humming, then the adapter as the engine adds it; left out if vLLM is not installed
- decoded: the weight decoded to bfloat16 for cuBLAS, then the adapter as the engine adds it
- adapter: our kernels for the adapter alone, in place on a product that another kernel has just written
- bf16: cuBLAS with a dense bfloat16 weight, then two cuBLAS products: the best that a BF16 LoRA engine can do

Times are microseconds in a CUDA graph, over so many random layers that no cache holds what is read. The limit is the
larger of two times, both by rates measured in this run: the needed bytes at the bandwidth of a copy, and the flops at
the rate of a large product. "share" is the limit divided by the time. "error" is the norm of the difference from the
float64 twin, divided by the twin's norm. "repeats" says that three calls are equal to the bit. At the end come sums
over the layer: with the ways that the engine takes without a measurement ("default"), with the faster of the two that
read our layout ("fastest"), and with Humming alone, whose layout an engine has with rollout.kernel=humming.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.formats.nvfp4 import lora, ways
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.tuning import CALLS, cold_layers, graph_us
from qerl.plan.sizes import KNOWN
from scripts.bench.limits import limits
from scripts.bench.linear_ways import WAYS, Linear, linears, random_adapter

OURS = ("fused", "decoded")  # the ways of qerl/formats/nvfp4/ways.py that read our layout
CHOICES = ("default", "fastest", "humming")

Row = dict[str, Any]


def main() -> None:
    from scripts.bench.provenance import command, machine, require_card, write

    arguments = options()
    require_card()
    torch.manual_seed(0)
    report = {"command": command(), **machine(), "shape": arguments.shape, "rank": arguments.rank}
    report |= {"limits": limits(), "results": []}
    torch.cuda.empty_cache()
    for linear in linears(arguments.shape, arguments.rank):
        for row in measured(linear, arguments.tokens, report["limits"]):
            report["results"].append(row)
            print(result_line(row), flush=True)
    report["layer"] = layer_sums(report["results"])
    write(report, arguments.out)
    print("", *map(sum_line, report["layer"]), sep="\n")


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(KNOWN))
    parser.add_argument("--rank", type=_positive, default=32)
    parser.add_argument("--tokens", type=_positive, nargs="+", default=[1, 8, 16, 32, 64, 96, 128, 192, 256])
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def _positive(word: str) -> int:
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return int(word)


def measured(linear: Linear, token_counts: Sequence[int], limits: dict[str, float]) -> Iterator[Row]:
    """One row for each way and number of tokens, without and with the adapter."""
    for name, way in WAYS.items():
        counts = [tokens for tokens in token_counts if way.runs(linear, tokens)]
        if not counts:
            continue
        alone = name == "adapter"
        number = cold_layers(int(linear.needs(name, 0, alone)[0]))
        adapters = [random_adapter(linear, "cuda") for _ in range(number)]
        weights = [way.make(linear, max(counts), "cuda") for _ in range(1 if alone else number)]
        weights *= number // len(weights)  # `alone` adds to a single product, which is in the cache as in an engine
        for tokens in counts:
            x = torch.randn(tokens, linear.columns, device="cuda", dtype=torch.bfloat16)
            for taken in [adapters] if alone else [[None] * number, adapters]:
                row = {"linear": linear.name, "rows": linear.rows, "columns": linear.columns, "tokens": tokens}
                row |= {"way": name, "adapter": taken is adapters, **compared(name, weights[0], x, taken[0])}
                calls = [partial(way.multiply, w, x, a) for w, a in zip(weights, taken, strict=True)]
                calls *= -(-CALLS // number)
                limit, of = linear.limit(name, tokens, taken is adapters, limits)
                us = graph_us(calls) / len(calls)
                yield row | {"us": us, "limit_us": limit, "limited_by": of, "share": limit / us}


def compared(name: str, weight: Any, x: torch.Tensor, adapter: Adapter | None) -> Row:
    """The error of one product against its twin, and whether three products are equal."""
    way = WAYS[name]
    expected = way.twin(weight, x)
    if adapter is not None:
        expected = lora.reference_add(expected, x, adapter)
    outs = [way.multiply(weight.clone() if name == "adapter" else weight, x, adapter) for _ in range(3)]
    error = ((outs[0].double() - expected).norm() / expected.norm()).item()
    return {"error": error, "repeats": all(torch.equal(outs[0], out) for out in outs[1:])}


def layer_sums(results: Sequence[Row]) -> list[Row]:
    """The sums over the four linears, for each number of tokens and each choice of ways measured for all of them."""
    by: dict[tuple[int, bool], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in results:
        by[row["tokens"], row["adapter"]][row["linear"]][row["way"]] = row
    counts = sorted({row["tokens"] for row in results})
    sums = (layer_sum(by[tokens, False], by[tokens, True], choice) for tokens in counts for choice in CHOICES)
    return [row for row in sums if row is not None]


def layer_sum(without: dict[str, dict[str, Row]], with_lora: dict[str, dict[str, Row]], choice: str) -> Row | None:
    """The sum for one number of tokens; `without` and `with_lora` map linear -> way -> row."""
    base = [choose(rows, choice) for rows in without.values()]
    taken = [choose(rows, choice) for rows in with_lora.values()]
    if None in base + taken:
        return None
    us, base_us, limit_us = _sum(taken, "us"), _sum(base, "us"), _sum(taken, "limit_us")
    bf16_us, bf16_lora_us = (_sum((rows["bf16"] for rows in part.values()), "us") for part in (without, with_lora))
    return {
        "tokens": taken[0]["tokens"],
        "choice": choice,
        "ways": {row["linear"]: row["way"] for row in taken},
        "us": us,
        "without_lora_us": base_us,
        "bf16_us": bf16_us,
        "bf16_lora_us": bf16_lora_us,
        "share": limit_us / us,
        "over_bf16_lora": bf16_lora_us / us,
        "lora_cost": us / base_us - 1,
        "bf16_lora_cost": bf16_lora_us / bf16_us - 1,
    }


def _sum(rows: Iterable[Row], key: str) -> float:
    return sum(row[key] for row in rows)


def choose(rows: dict[str, Row], choice: str) -> Row | None:
    """The row of the way that the engine would take, from way -> row of one linear at one number of tokens.

    None if that way was not measured.
    """
    if choice == "humming":
        return rows.get("humming")
    if choice == "fastest":
        right = [row for way, row in rows.items() if way in OURS and row["error"] < ways.WRONG]
        return min(right, key=lambda row: row["us"], default=None)
    row, kernel = rows["bf16"], "qerl" if "fused" in rows else "marlin"
    return rows.get(ways.Shape(row["rows"], row["columns"], 0, kernel, "fused" in rows).default_way(row["tokens"]))


def result_line(row: Row) -> str:
    lora_text, repeats = "+ lora" if row["adapter"] else "", "repeats" if row["repeats"] else "differs"
    head = f"{row['linear']:8}{row['tokens']:4} {row['way']:8}{lora_text:7}{row['us']:8.1f} us"
    return f"{head}{row['share']:6.2f} of {row['limited_by']}  error {row['error']:.4f}  {repeats}"


def sum_line(row: Row) -> str:
    head = f"layer {row['tokens']:4} {row['choice']:8}{row['us']:8.1f} us{row['share']:6.2f} of the limit"
    stock = f"{row['over_bf16_lora']:.2f} times as fast as BF16 + LoRA ({row['bf16_lora_us']:.1f} us)"
    return f"{head}, {stock}, LoRA costs {100 * row['lora_cost']:.0f}%; {', '.join(row['ways'].values())}"


if __name__ == "__main__":
    main()
