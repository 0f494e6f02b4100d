#!/usr/bin/env python3
"""Seconds of `qerl quantize` by part, and its peak memory, on random weights of a real model's shape; writes JSON.

    python3 scripts/bench/bench_quantize.py --shape qwen2.5-7b --out OUT/quantize-7b.json
    python3 scripts/bench/bench_quantize.py --shape qwen2.5-32b --layers 1 3 --out OUT/quantize-32b.json
    python3 scripts/bench/bench_quantize.py --shape qwen2.5-7b --method rtn --out OUT/quantize-7b-rtn.json

Layers are alike, so that the whole model's seconds follow from two models of a few: `whole_s` adds to the smaller one's
as many times what a further layer takes as are missing. Parts are measured with the device synchronized before and
after each, and a part's seconds leave out those of the parts inside it. A model of one layer is quantized first, which
compiles the kernels. `rest` has what no part names: the progress bar, headers, the start's file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import quantize.one_pass
import quantize.output_error
import quantize.rounding
import quantize.run
from qerl.checkpoint import output as writer
from quantize.one_pass import LayeredModel
from quantize.options import QuantizeOptions
from scripts.bench.provenance import command, machine, write
from scripts.models.make_random_checkpoint import SHAPES
from scripts.models.make_random_checkpoint import write as write_model

PARTS = {  # where a function is looked up, and its name
    "read": (quantize.one_pass, "_load"),
    "forward": (LayeredModel, "step"),
    "moments": (quantize.one_pass, "add_products_"),
    "search": (quantize.one_pass, "searched_scales"),
    "cholesky": (quantize.rounding, "error_shares"),
    "gptq": (quantize.one_pass, "gptq"),
    "factors": (quantize.one_pass, "best_factors"),
    "ratio": (quantize.one_pass, "rate_ratio"),
    "write": (writer, "_write_part"),
    "verify": (quantize.run, "verify"),
    "measure": (quantize.output_error, "measure_outputs"),
}


class Clock:
    """Seconds of parts that lie within one another: each second counts for the innermost."""

    def __init__(self, device: str) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._inside: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, whose seconds count for `part`."""

        def call(*arguments: object, **keywords: object) -> object:
            self._change(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self._change(None)

        return call

    def _change(self, part: str | None) -> None:
        """Enter a part, or with None leave the innermost."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now
        if part is None:
            self._inside.pop()
        else:
            self._inside.append(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="of the two models")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    options = QuantizeOptions(arguments.method, calibration="mixed", overwrite=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = [measured(arguments.shape, layers, options, Path(folder)) for layers in (1, *arguments.layers)][1:]
    whole = whole_s(*runs, SHAPES[arguments.shape]["num_hidden_layers"])
    report = {"command": command(), **machine(), "shape": arguments.shape, "whole_s": whole, "runs": runs}
    print(write(report, arguments.out))


def measured(shape: str, layers: int, options: QuantizeOptions, folder: Path) -> dict:
    """Quantize a random model of so many layers: seconds by part and in all, peak memory, and what was chosen."""
    folder = folder / str(layers)
    write_model(shape, folder / "bf16", "bf16", layers, 0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        report = quantize.run.quantize_checkpoint(str(folder / "bf16"), folder / "nvfp4", options)
    seconds = {part: round(value, 2) for part, value in clock.seconds.items()}
    seconds["rest"] = round(report.seconds - sum(clock.seconds.values()), 2)
    shutil.rmtree(folder)
    return {
        "layers": layers,
        "method": report.method,
        "calibration": report.calibration,
        "start": report.start,
        "seconds": seconds,
        "total_s": report.seconds,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
    }


def whole_s(small: dict, large: dict, layers: int) -> float:
    """Seconds of the model with all its layers, from those of two with fewer."""
    of_a_layer = (large["total_s"] - small["total_s"]) / (large["layers"] - small["layers"])
    return round(small["total_s"] + of_a_layer * (layers - small["layers"]), 1)


if __name__ == "__main__":
    main()
