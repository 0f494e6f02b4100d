#!/usr/bin/env python3
"""Seconds, memory and mismatch of training through the quantizer, and the bytes that the engine then holds.

    python3 scripts/bench/bench_qat.py --model checkpoints/random-7b --out benchmarks/qat-7b.json
    python3 scripts/bench/bench_qat.py --model checkpoints/random-7b --mode adapter --set qat.start_in=host --out F

The workload is that of bench_step.py, and `--model` is a 16-bit checkpoint. Noise is off, so that `mismatch_kl` is that
of the two forward passes alone. After the last step comes one more sync, and then every linear is compared: what the
engine's tensors hold, read by the inverse of the layout, with `reference.quantize` of the master and the global scale
that the run began with, and their addresses with those at the first sync. The run ends there, without a checkpoint: at
7B that would be 40 GB. Started by torchrun, it trains on several cards; each compares the linears that it packs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.bench_step import PeakMemory, SoFar, add_options, overrides

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel

SHOWN = {
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "optimizer_s": "time/optimizer_s",
    "sync_s": "time/sync_s",
    "peak_gib": "memory/peak_gib",
    "planned_gib": "memory/train_planned_gib",
    "train_gib": "memory/train_gib",
    "mismatch_kl": "mismatch_kl",
    "grad_norm": "grad_norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--masters", default="float32", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--mode", default="weights", choices=("weights", "adapter"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from qerl.base.devices import choose_card
    from qerl.base.parallel import open_parallel
    from scripts.bench.provenance import command, machine, require_card, write

    with open_parallel() as parallel:
        choose_card(parallel.local_rank if parallel.size > 1 else None)
        require_card("vllm")  # looks at the cards, so each rank has to have its own by then
        head = {"command": command(), **machine()}
        report = {**head, **measured(arguments, parallel, head)}
    if parallel.first:
        write(report, arguments.out)
        print(table(report))


def measured(arguments: argparse.Namespace, parallel: Parallel, head: dict[str, Any]) -> dict[str, Any]:
    """Train, and what was seen, of all ranks together."""
    from qerl.config.recipe import load_recipe
    from qerl.engine.vllm.engine import VLLMEngine
    from scripts.bench.watch import Finished, Watch
    from training import run as training_run

    with tempfile.TemporaryDirectory() as own, PeakMemory() as peak:
        folder = parallel.broadcast(own)
        run = Path(folder) / "run"
        arguments.set += own_settings(arguments)
        arguments.steps += 1  # the last one ends with its sync
        config = load_recipe("dapo_7b", overrides(arguments, Path(folder)) if parallel.first else [])
        config = parallel.broadcast(config)
        training_run.check_room = lambda *arguments: None  # for a checkpoint that is not written
        watch, started = Watch(VLLMEngine, arguments.steps, ends=True), time.monotonic()
        try:
            with watch, SoFar(head, run / "metrics.jsonl", arguments.out if parallel.first else None):
                training_run.start(config, "bench", parallel)
        except Finished:
            pass
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = time.monotonic() - started
        seen, peaks = parallel.gather(watch.seen), parallel.gather(round(peak.gib, 2))
    return {
        "cards": parallel.size,
        "mode": arguments.mode,
        "masters": arguments.masters if arguments.mode == "weights" else None,
        "run_s": round(seconds, 1),
        "peak_driver_gib": max(peaks),
        "sync": merged(seen if arguments.mode == "weights" else seen[:1]),
        "steps": [json.loads(line) for line in lines],
    }


def own_settings(arguments: argparse.Namespace) -> list[str]:
    """What the recipe has beside the workload, as `--set` values."""
    masters = [f"qat.masters={arguments.masters}"] if arguments.mode == "weights" else []
    return [f"qat.mode={arguments.mode}", "noise.enabled=false", *masters]


def merged(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks saw: of each sync the slowest, and all linears, of which each rank packs some."""
    whole = {**seen[0], "s": [max(each) for each in zip(*(one["s"] for one in seen), strict=True)]}
    for key in ("linears", "moved", "different"):
        if key in whole:
            whole[key] = sum((one[key] for one in seen[1:]), seen[0][key])
    return whole


def table(report: dict[str, Any]) -> str:
    """One line per step, then what the last sync showed."""
    lines = ["".join(f"{name:>12}" for name in ("step", *SHOWN))]
    for step in report["steps"]:
        cells = [step["step"], *(step.get(key) for key in SHOWN.values())]
        lines.append("".join(f"{cell:12.4g}" if isinstance(cell, int | float) else f"{'-':>12}" for cell in cells))
    sync = report["sync"]
    first, last = (report["steps"][at]["mismatch_kl"] for at in (0, -1))
    lines.append(f"mismatch_kl of the first step {first:.2e}, of the last {last:.2e}")
    lines.append("syncs, ms: " + " ".join(f"{1e3 * seconds:.1f}" for seconds in sync["s"]))
    if "linears" in sync:
        wrong, moved = (len(sync[key]) for key in ("different", "moved"))
        lines.append(f"after the last: {wrong} of {sync['linears']} linears differ from the reference, {moved} moved")
    lines.append(f"driver's peak {report['peak_driver_gib']} GiB, run {report['run_s']} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
