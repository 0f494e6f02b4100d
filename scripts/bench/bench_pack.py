#!/usr/bin/env python3
"""Packing all masters of a model into the tensors that an engine reads, beside stock vLLM's `reload_weights`; JSON.

    python3 scripts/bench/bench_pack.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/pack-7b.json

`--model` gives the shapes, and is what stock vLLM opens. Our time is that of `pack_weights_`, the launches and the
reading of the counts included: from masters on the card to packed weights on the card. `launches` are the same without
the reading, by the clock of the host. The limit is the time of a copy of as many bytes as have to be read and written.
`different` lists the fused linears whose bytes are not those of the reference.

Stock vLLM is given the tensors of its checkpoint on the card, already quantized, so its time does not include the
quantizer that it needs besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.checkpoint.experts import GATE_UP, QKV
from qerl.engine.update import pack_weights_
from qerl.formats.nvfp4 import reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.linear import KernelLinear
from qerl.plan.sizes import ModelSizes, read_sizes
from scripts.bench.limits import copy_gb_per_s
from scripts.bench.provenance import command, machine, require_card

ROUNDS = 7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCALE = 4096.0  # a power of two, with head room for weights of this size
STD = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--no-stock", action="store_true", help="leave vLLM out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card(*(() if arguments.no_stock else ("vllm",)))
    report = {"command": command(), **machine(), "gb_per_s": copy_gb_per_s(), "masters": {}}
    for name, dtype in DTYPES.items():
        report["masters"][name] = ours(read_sizes(arguments.model), dtype, report["gb_per_s"])
        _write(report, arguments.out)
        _free()
    if not arguments.no_stock:
        report["stock_reload"] = stock(arguments.model)
    _write(report, arguments.out)
    print(_table(report))


def ours(sizes: ModelSizes, dtype: torch.dtype, gb_per_s: float) -> dict:
    """Times in ms of packing a model of this shape from masters of `dtype`, and the linears whose bytes are wrong."""
    generator = torch.Generator("cuda").manual_seed(0)
    views, masters, fused = {}, {}, {}
    for name, parts, columns in _fused(sizes):
        fused[name] = _empty(sum(parts.values()), columns)
        start = 0
        for part, rows in parts.items():
            master = torch.randn(rows, columns, generator=generator, device="cuda").mul_(STD)
            on_grid = len(masters) % 2 == 0  # numbers of bfloat16 lie on rounding ties far more often
            masters[part] = (master.bfloat16() if on_grid else master).to(dtype)
            views[part] = KernelLinear(fused[name], start, rows, None)
            start += rows
    read, written = (sum(t.nbytes for t in tensors) for tensors in (masters.values(), _packed(fused.values())))
    milliseconds, limit = _median_ms(lambda: pack_weights_(masters, views)), (read + written) / gb_per_s / 1e6
    return {
        "linears": len(masters),
        "master_gb": read / 1e9,
        "packed_gb": written / 1e9,
        "ms": milliseconds,
        "launches_ms": _launches_ms(views, masters),
        "limit_ms": limit,
        "share_of_limit": limit / milliseconds,
        "twin_ms": _twin_ms(views, masters),
        "different": _different(sizes, fused, masters),
    }


def _fused(sizes: ModelSizes) -> Iterator[tuple[str, dict[str, int], int]]:
    """Name, rows by part and columns of each linear as vLLM fuses them."""
    for layer in range(sizes.layers):
        left = dict(sizes.projections)
        for group in (QKV, GATE_UP, *((name,) for name in left if name not in (*QKV, *GATE_UP))):
            yield f"{layer}.{group[0]}", {f"{layer}.{name}": left[name][0] for name in group}, left[group[0]][1]


def _empty(rows: int, columns: int) -> KernelWeight:
    blocks, units = -(-rows // slab_layout.ROWS), -(-columns // slab_layout.UNIT)
    words = torch.zeros(blocks, units, 2048, dtype=torch.int32, device="cuda")
    return KernelWeight(QERL, words, words.new_zeros(blocks, units, 1024, dtype=torch.uint8), rows, columns, SCALE)


def _packed(weights) -> list[torch.Tensor]:
    return [tensor for weight in weights for tensor in (weight.words, weight.scales)]


def _twin_ms(views: dict, masters: dict) -> float:
    """Milliseconds of the same in plain torch, from those of the first layer."""
    first = [name for name in masters if name.startswith("0.")]

    def pack() -> None:
        for name in first:
            view, scale = views[name], torch.tensor([SCALE], device="cuda")
            tensors = reference.quantize(masters[name], scale)
            words, scales = view.kernel_weight.words, view.kernel_weight.scales
            slab_layout.pack_(words, scales, view.row_start, tensors.packed, tensors.block_scale)

    return _median_ms(pack, 3) * len(masters) / len(first)


def _different(sizes: ModelSizes, fused: dict, masters: dict) -> list[str]:
    """The fused linears whose words or scales are not those of the reference, computed on the card in plain torch."""
    wrong, scale = [], torch.tensor([SCALE], device="cuda")
    for name, parts, columns in _fused(sizes):
        expected, start = _empty(sum(parts.values()), columns), 0
        for part, rows in parts.items():
            tensors = reference.quantize(masters[part], scale)
            slab_layout.pack_(expected.words, expected.scales, start, tensors.packed, tensors.block_scale)
            start += rows
        same = torch.equal(expected.words, fused[name].words) and torch.equal(expected.scales, fused[name].scales)
        wrong += [] if same else [name]
    return wrong


def stock(model: str) -> dict:
    """Seconds of stock vLLM's `reload_weights` with the checkpoint's own tensors on the card; or how it failed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from safetensors.torch import load_file
    from vllm import LLM

    shared = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**30, "max_model_len": 640}
    llm = LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, **shared)
    tensors = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        tensors |= load_file(file, device="cuda")
    seconds = []
    try:
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except Exception as error:  # a failure of vLLM's is a result too
        return {"error": f"{type(error).__name__}: {error}", "s": seconds}
    return {"s": seconds, "median_s": median(seconds), "tensors": len(tensors)}


def _median_ms(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


def _launches_ms(views: dict, masters: dict) -> float:
    """Milliseconds that the host needs to start everything."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    counts = [views[name].write_(master) for name, master in masters.items()]
    seconds = time.perf_counter() - started
    del counts
    return 1e3 * seconds


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _write(report: dict, path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _table(report: dict) -> str:
    lines = [f"{'masters':10}{'ms':>9}{'limit ms':>10}{'share':>8}{'launches ms':>13}{'twin ms':>10}  different"]
    for name, result in report["masters"].items():
        numbers = f"{result['ms']:9.2f}{result['limit_ms']:10.2f}{result['share_of_limit']:8.0%}"
        rest = f"{result['launches_ms']:13.2f}{result['twin_ms']:10.0f}"
        lines.append(f"{name:10}{numbers}{rest}  {len(result['different'])} of {result['linears']}")
    if found := report.get("stock_reload"):
        taken = report["masters"]["float32"]["ms"]
        told = (
            found.get("error") or f"{1e3 * found['median_s']:.1f} ms, {1e3 * found['median_s'] / taken:.0f} times ours"
        )
        lines.append(f"stock vLLM reload_weights: {told}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
