#!/usr/bin/env python3
"""Where the time of a training step goes, by phase and kernel, and each phase's share of the card's limit; writes JSON.

    python3 scripts/bench/profile_step.py --model checkpoints/random-7b-NVFP4A16 --out profile-7b.json
    python3 scripts/bench/profile_step.py --model checkpoints/random-7b-NVFP4A16 --phase decode \
        --sequences 1 8 32 128 256
    python3 scripts/bench/profile_step.py --model checkpoints/random-7b --phase weights --out profile-qat-7b.json

The workload and its options are those of scripts/bench/bench_step.py; torch.profiler watches its second step. Limits
are measured first: the rate of a large bfloat16 product, and the bandwidth of a copy. This counts as needed:

- training: 2 flops per weight and token forward, 2 for the gradient to the input, and 2 for that of a weight which is
  trained; in the decoder layers for the
  tokens of all completions and of each prompt once, in the head for completion tokens (it computes its slope instead).
  Repeated prompts and recomputation count as waste. Decoding the weights reads 4.5 bits per weight and writes 16, at
  the bandwidth;
- rollout: the bytes that each decode step reads (packed body, 16-bit head, adapter, and the keys and values of every
  sequence), at the bandwidth; and 2 flops per weight for each sampled token, and once for each prompt token, at the
  rate.

scripts/bench/limits.py counts and measures. `--phase decode` opens the engine alone and profiles decode steps for
several numbers of sequences, each with the same two shares. `--phase weights` trains whole weights through the
quantizer, from a 16-bit checkpoint as bench_qat.py does, and profiles the optimizer's step too where masters are in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.plan.sizes import ModelSizes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROMPT_TOKENS = 128
LINEARS = 4  # per layer, as they are decoded: q/k/v and gate/up are one linear each
PROFILED_STEP = 1  # the second step, because the first one compiles
CATEGORIES = {  # by parts of the kernel's name; the first match counts
    "adapter": ("lora_shrink", "_shrink_kernel", "_activate_kernel", "_expand_kernel", "_combine_kernel"),
    "routing": ("moe_align", "topk_softmax", "topkGating", "count_and_sort"),
    "decode weights": ("nvfp4_decode", "_dequantize_kernel"),
    "quantized product": ("nvfp4_gemm", "nvfp4_linear", "humming", "marlin"),
    "attention": ("attend", "flash", "fmha", "attention"),  # attend.cu is ours
    "product": ("nvjet", "gemm", "cublas", "cutlass", "splitK"),
    "sampling": ("_block_kernel", "_row_kernel", "gumbel", "topk", "_ranks"),
    "rounding": ("_round_kernel", "_largest", "_turn_kernel", "_round_randomly"),
    "copy": ("Memcpy", "Memset", "memcpy", "copy_kernel", "CatArray"),
    "reduction": ("reduce", "_red_", "softmax", "rms_norm"),
}


def main() -> None:
    from scripts.bench.bench_step import add_options
    from scripts.bench.limits import limits
    from scripts.bench.provenance import command, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(steps=3)
    parser.add_argument("--phase", choices=("step", "decode", "weights"), default="step")
    parser.add_argument("--kernel", default="auto", help="for --phase decode")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 256], help="for --phase decode")
    parser.add_argument("--decode-steps", type=int, default=48, help="for --phase decode")
    arguments = parser.parse_args()
    if arguments.phase != "decode" and arguments.steps <= PROFILED_STEP:
        parser.error(f"--steps {arguments.steps} ends before the profiled step: write {PROFILED_STEP + 1} or more")
    report = {"command": command(), **machine(), "limits": limits()}
    report |= (
        decode_phase(arguments, report["limits"])
        if arguments.phase == "decode"
        else whole_step(arguments, report["limits"])
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)


def whole_step(arguments: argparse.Namespace, limit: dict[str, float]) -> dict[str, Any]:
    """Run the workload of bench_step, or of bench_qat, profiling the phases of one step."""
    import tempfile

    from qerl.config.recipe import load_recipe
    from qerl.plan.sizes import read_sizes
    from scripts.bench.bench_qat import own_settings
    from scripts.bench.bench_step import overrides
    from scripts.bench.limits import Work, rollout_need, shares, training_flops
    from training import run as training_run
    from training.policy.rounding import RandomlyRounded
    from training.rollout.sampler import Sampler
    from training.trainer import QerlTrainer

    phases: dict[str, Any] = {}
    lengths: list[int] = []

    def keep_lengths(output: Any) -> None:
        lengths[:] = [len(sample.token_ids) for group in output.groups for sample in group.samples]

    step_of_rollout, step_of_loss, updates_of = (
        lambda _, prompts, moment, *rest: moment.step,
        lambda self, *_: self.state.global_step,
        lambda self, *_: self.param_groups[0]["updates"],
    )
    Sampler.sample = profiled(Sampler.sample, phases, "rollout", step_of_rollout, keep_lengths)
    QerlTrainer.compute_loss = profiled(QerlTrainer.compute_loss, phases, "training", step_of_loss)
    RandomlyRounded.step = profiled(RandomlyRounded.step, phases, "optimizer", updates_of)
    weights = arguments.phase == "weights"
    if weights:
        arguments.mode, arguments.masters = "weights", "auto"
        arguments.set += own_settings(arguments)
        arguments.steps += 1  # the last one ends with its sync
        training_run.check_room = lambda *arguments: None  # for a checkpoint that is not written
    with tempfile.TemporaryDirectory() as folder:
        config = load_recipe("dapo_7b", overrides(arguments, Path(folder)))
        with ending_with(arguments.steps) if weights else nullcontext():
            training_run.start(config, "profile")
        lines = (Path(config.run.out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    work, steps = Work.of(config, read_sizes(arguments.model)), [json.loads(line) for line in lines]
    work = replace(work, adapter=0, expert_adapter=0) if weights else work
    training, rollout = phases["training"], phases["rollout"]
    flops = training_flops(work, steps[PROFILED_STEP], weights)
    training["needed_tflop"] = flops / 1e12
    rate = flops / 1e12 / (training["wall_ms"] / 1e3)
    training["share_of_matrix_rate"] = rate / limit["tflops"]
    training["share_of_sustained_rate"] = rate / limit["sustained_tflops"]
    training |= decoded(training["kernels"], work.sizes, limit["gb_per_s"])
    rollout |= shares(rollout_need(work, lengths), rollout["wall_ms"] / 1e3, limit)
    return {"phases": phases, "steps": steps}


@contextmanager
def ending_with(sync: int) -> Iterator[None]:
    """Within it a run of whole weights ends after that sync, without a checkpoint: at 7B that would be 40 GB."""
    from qerl.engine.vllm.engine import VLLMEngine
    from scripts.bench.watch import Finished, Watch

    with suppress(Finished), Watch(VLLMEngine, sync, ends=True):
        yield


def decoded(kernels: list[dict[str, Any]], sizes: ModelSizes, gb_per_s: float) -> dict[str, float]:
    """GB that decoding the weights read and wrote, and the share of the bandwidth; empty if nothing was decoded.

    Each call counts as the mean of a layer's linears. That is nearly exact: only the first layer's q/k/v is decoded
    less often, because its input needs no gradient. With experts calls are too unequal for that, and it is empty.
    """
    from qerl.formats import NVFP4

    rows = [row for row in kernels if category(row["name"]) == "decode weights"]
    if not rows or sizes.decoder.has_experts:
        return {}
    calls, seconds = sum(row["calls"] for row in rows), sum(row["ms"] for row in rows) / 1e3
    gb = calls / (LINEARS * sizes.layers) * sizes.body * (NVFP4.bytes_per_weight + 2) / 1e9
    return {"decoded_gb": gb, "share_of_bandwidth_decoding": gb / seconds / gb_per_s}


def profiled(
    method: Callable,
    phases: dict[str, Any],
    name: str,
    step_of: Callable[[Any], int],
    seen: Callable[[Any], None] = lambda output: None,
) -> Callable:
    """`method` of a class, profiled when its object is at PROFILED_STEP; `seen` gets what it then returns."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if step_of(self, *args) != PROFILED_STEP:
            return method(self, *args, **kwargs)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as result:
            started = time.perf_counter()  # not before, because the profiler takes a while to start
            output = method(self, *args, **kwargs)
            torch.cuda.synchronize()
            wall = time.perf_counter() - started
        rows = [
            {"name": event.key, "ms": event.device_time_total / 1e3, "calls": event.count}
            for event in result.key_averages()
            if event.device_time_total > 0
        ]
        device = [event for event in result.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(event.time_range.start / 1e3, event.time_range.end / 1e3, event.name) for event in device]
        phases[name] = summary(rows, 1e3 * wall) | {"gaps": gaps(spans)}
        seen(output)
        return output

    return wrapped


def summary(kernels: list[dict[str, Any]], wall_ms: float) -> dict[str, Any]:
    """The kernels by time and by category, and how long the GPU was busy."""
    by_category: dict[str, float] = defaultdict(float)
    for row in kernels:
        by_category[category(row["name"])] += row["ms"]
    busy = sum(by_category.values())
    kernels = sorted(kernels, key=lambda row: -row["ms"])[:40]
    order = dict(sorted(by_category.items(), key=lambda item: -item[1]))
    return {"wall_ms": wall_ms, "busy_ms": busy, "categories_ms": order, "kernels": kernels}


def gaps(spans: list[tuple[float, float, str]], count: int = 20) -> list[dict[str, Any]]:
    """The longest times in which no kernel runs: when, how long, and after and before which kernel.

    `spans` are (start, end, name) of the kernels, in ms.
    """
    found: list[dict[str, Any]] = []
    spans = sorted(spans)
    first, end, last = spans[0] if spans else (0.0, 0.0, "")
    for start, its_end, name in spans:
        if start > end:
            found.append({"at_ms": end - first, "ms": start - end, "after": last[:60], "before": name[:60]})
        if its_end > end:
            end, last = its_end, name
    return sorted(found, key=lambda gap: -gap["ms"])[:count]


def category(name: str) -> str:
    return next((label for label, parts in CATEGORIES.items() if any(p in name for p in parts)), "elementwise")


def decode_phase(arguments: argparse.Namespace, limit: dict[str, float]) -> dict[str, Any]:
    """Profile decode steps of the engine alone: a call for many tokens, less a call for one token."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from scripts.bench import bench_rollout
    from scripts.bench.limits import decode_need, shares

    tokens = ["--prompt-tokens", str(PROMPT_TOKENS), "--new-tokens", str(arguments.decode_steps + 1)]
    sequences = ["--sequences", *map(str, arguments.sequences)]
    workload = ["--model", arguments.model, "--rank", str(arguments.rank), *tokens, *sequences]
    generate, opened = bench_rollout.open_qerl(
        bench_rollout.options().parse_args([*workload, "--kernel", arguments.kernel])
    )
    report: dict[str, Any] = {}
    for count in arguments.sequences:
        rng = random.Random(count)

        def run(new_tokens: int, count: int = count, rng: random.Random = rng) -> float:
            prompts = [[rng.randint(1, 256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
            started = time.perf_counter()
            generate(prompts, new_tokens)
            torch.cuda.synchronize()
            return time.perf_counter() - started

        run(arguments.decode_steps + 1)
        wall_ms = 1e3 * (run(arguments.decode_steps + 1) - run(1)) / arguments.decode_steps
        rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for sign, sampled in ((1, arguments.decode_steps + 1), (-1, 1)):
            with profile(activities=[ProfilerActivity.CUDA]) as result:
                run(sampled)
            for event in result.key_averages():
                rows[event.key][0] += sign * event.device_time_total / 1e3 / arguments.decode_steps
                rows[event.key][1] += sign * event.count / arguments.decode_steps
        kernels = [{"name": name, "ms": ms, "calls": calls} for name, (ms, calls) in rows.items() if ms > 0]
        need = decode_need(arguments.model, arguments.rank, count, PROMPT_TOKENS + (arguments.decode_steps + 1) / 2)
        report[str(count)] = summary(kernels, wall_ms) | shares(need, wall_ms / 1e3, limit)
    return {**opened, "decode": report}


def show(report: dict[str, Any]) -> None:
    print(f"limits: {report['limits']['tflops']:.0f} TFLOP/s, {report['limits']['gb_per_s']:.0f} GB/s")
    phases = report.get("phases") or {f"{count} sequences": entry for count, entry in report["decode"].items()}
    for name, phase in phases.items():
        shares = [f"{key} {phase[key]:.1%}" for key in phase if key.startswith("share")]
        print(f"== {name}: {phase['wall_ms']:.2f} ms, GPU busy {phase['busy_ms']:.2f} ms {' '.join(shares)}")
        for label, milliseconds in phase["categories_ms"].items():
            print(f"   {milliseconds:10.2f} ms  {label}")
        for row in phase["kernels"][:14]:
            print(f"      {row['ms']:10.3f} ms {row['calls']:8.1f} x  {row['name'][:100]}")
        for gap in phase.get("gaps", [])[:8]:
            print(f"      {gap['ms']:10.3f} ms idle at {gap['at_ms']:.1f} ms, {gap['after']} -> {gap['before']}")


if __name__ == "__main__":
    main()
