#!/usr/bin/env python3
"""Seconds and memory of a step of `qerl train`, on a random checkpoint with the shape of a real model; writes JSON.

    python3 scripts/bench/bench_step.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/step-7b-qerl.json

The default is workload A: rank 32, 16 prompts x 8 completions, 128 prompt tokens, exactly 512 new ones (or mixed
lengths up to --new-tokens, if the checkpoint was made with --mean-tokens). Started by torchrun, it trains on several
cards. With `--set rollout.carry_over=2` the first steps fill the engine and the last ones have no further prompts to
begin, so `middle_step_s` is of the others. The weights are random, and the reward of a completion is computed from its
text as if at random, so that groups
have advantages. Seconds are those of metrics.jsonl. Peak memory is what the driver reports for the whole card, read
every 10 ms. After the run, the same process measures the card's matrix rate, and adds to each step the share of it that
training reached, counting only the needed flops (scripts/bench/limits.py).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.provenance import command, commit, machine, write

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig

GIB = 2**30
SO_FAR_S = 2.0  # between two looks at the steps of a run
STAGES = 3  # the fewest noise stages that the recipe allows; a run of fewer steps has no noise
REWARD = '''
import zlib

def drawn(completions, **columns):
    """A checksum between 0 and 1: completions of one group differ, so that no step trains on fewer groups."""
    return [zlib.crc32(text.encode("utf-8", "replace")) / 2**32 for text in completions]
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from qerl.base.devices import choose_card
    from qerl.base.parallel import open_parallel

    with open_parallel() as parallel:
        choose_card(parallel.local_rank if parallel.size > 1 else None)
        report = measure(arguments, parallel)
    if parallel.first:
        print(json.dumps(report, indent=1))


def measure(arguments: argparse.Namespace, parallel: Parallel) -> dict[str, Any]:
    """Train, and write the report; of several ranks, which torchrun starts, the first one writes."""
    from qerl.config.recipe import load_recipe
    from training.run import start

    with tempfile.TemporaryDirectory() as own, PeakMemory() as peak:
        folder = Path(parallel.broadcast(own))
        config = load_recipe("dapo_7b", overrides(arguments, folder) if parallel.first else [])
        config = parallel.broadcast(config)
        metrics, out = Path(config.run.out) / "metrics.jsonl", arguments.out if parallel.first else None
        started = time.monotonic()
        with SoFar({"command": command(), "commit": commit()}, metrics, out):  # which ask nothing of the card yet
            result = start(config, "bench", parallel)
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = time.monotonic() - started
        peaks = parallel.gather(round(peak.gib, 2))
    report = {
        "command": command(),
        **machine(),
        "run_s": round(seconds, 1),
        "peak_driver_gib": max(peaks),
        "cards": parallel.size,
        "middle_step_s": middle([json.loads(line)["time/step_s"] for line in lines]),
        "steps": [json.loads(line) for line in lines],
    }
    if not parallel.first:
        return report
    write(report, arguments.out)  # already here, because the next measurement may fail after a long run
    # The flops are counted for prompts of one length.
    add_shares(report, config, None if arguments.varied_prompts else matrix_rate())
    write(report, arguments.out)
    return report


def middle(seconds: list[float]) -> list[float] | None:
    """(smallest, mean, largest) without the first and the last three of at least nine steps."""
    kept = seconds[3:-3]
    return [round(value, 2) for value in (min(kept), mean(kept), max(kept))] if len(kept) >= 3 else None


def matrix_rate() -> float | None:
    """TFLOP/s of this card, None without one. First frees the memory that the finished run still holds."""
    import gc

    import torch

    from scripts.bench.limits import matrix_tflops

    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return round(matrix_tflops(), 1)


def add_shares(report: dict[str, Any], config: RunConfig, tflops: float | None) -> None:
    """Add `matrix_tflops` to the report, and to each step the share of it that training reached."""
    from qerl.plan.sizes import read_sizes
    from scripts.bench.limits import Work, train_share

    report["matrix_tflops"] = tflops
    work = Work.of(config, read_sizes(config.model.base))
    for step in report["steps"]:
        share = None if tflops is None else train_share(work, step, tflops)
        step["train_share_of_matrix_rate"] = None if share is None else round(share / report["cards"], 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the workload, which other scripts that train it have as well."""
    add_sizes(parser)
    parser.add_argument("--varied-prompts", action="store_true", help="lengths up to --prompt-tokens")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: what the plan chooses")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that the workload has by any trainer."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--cap-gib", type=float, help="memory of the card that this run stands for")
    parser.add_argument("--out", type=Path)
    sizes = {"steps": 4, "rank": 32, "prompts": 16, "group": 8, "prompt-tokens": 128, "new-tokens": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)


def varied(draw: random.Random, longest: int) -> int:
    """A length like those of DAPO-Math-17k's prompts: log-normal, median a tenth of the longest."""
    return max(8, min(longest, round(draw.lognormvariate(math.log(longest / 10), 0.8))))


def overrides(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The workload as `--set` values for the recipe dapo_7b. Each byte of a prompt is one token."""
    rows = folder / "rows.jsonl"
    length = arguments.prompt_tokens - 1  # the chat template of the random checkpoints adds a newline
    draw = random.Random(0)
    lengths = [varied(draw, length) if arguments.varied_prompts else length for _ in range(64)]
    questions = [f"{number:04d} ".ljust(lengths[number], "abcdefgh"[number % 8]) for number in range(64)]
    lines = [json.dumps({"question": question, "answer": "#### 7"}) for question in questions]
    rows.write_text("\n".join(lines), encoding="utf-8")
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    values = {
        "rewards": f"[{{name: '{reward}:drawn'}}]",
        "model.base": arguments.model,
        "adapter.rank": arguments.rank,
        "adapter.alpha": 2 * arguments.rank,
        "data.task": "gsm8k",
        "data.source": rows,
        "data.system_prompt": "null",
        "data.prompt_template": "'{question}'",
        "data.max_prompt_tokens": arguments.prompt_tokens,
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.group_size": arguments.group,
        "rollout.max_new_tokens": arguments.new_tokens,
        "rollout.dynamic_sampling.enabled": "false",  # at random, it would add rollouts that TRL does not have
        "loss.mask_truncated": "false",
        "loss.mismatch_gate": "null",  # the mismatch is reported instead
        "validation.every": "null",  # its questions would come from the hub
        "noise.num_stages": STAGES,
        "noise.enabled": str(arguments.steps >= STAGES).lower(),
        "run.steps": arguments.steps,
        "run.micro_batch_tokens": arguments.micro_batch_tokens or "null",
        "run.save_every": 1000,
        "run.out": folder / "run",
        "memory.cap_gib": "null" if arguments.cap_gib is None else arguments.cap_gib,
    }
    return [f"{key}={value}" for key, value in values.items()] + arguments.set


class SoFar:
    """While the block runs, `out` gets `head` and the complete lines of `metrics` as `steps`, with `unfinished`."""

    def __init__(self, head: dict[str, Any], metrics: Path, out: Path | None) -> None:
        self._head, self._metrics, self._out = head, metrics, out
        self._done, self._steps = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> SoFar:
        if self._out is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self.write()

    def write(self) -> None:
        """Write the file anew if there are further steps."""
        if self._out is None or not self._metrics.exists():
            return
        lines = self._metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        if len(lines) > self._steps:
            self._steps = len(lines)
            report = {**self._head, "unfinished": True, "steps": [json.loads(line) for line in lines]}
            write(report, self._out)

    def _watch(self) -> None:
        while not self._done.wait(SO_FAR_S):
            self.write()


class PeakMemory:
    """The most that the driver reports as taken on the card while the block runs, in GiB."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        import torch

        while not self._done.wait(0.01):
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self.gib = max(self.gib, taken_gib())


def taken_gib() -> float:
    """GiB that the driver reports as taken on the card."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


if __name__ == "__main__":
    main()
