"""Compares what `qerl plan` predicts with what scripts/bench/ measured (benchmarks/), and prints Markdown tables.

    python scripts/checks/plan_check.py

The tables have the memory and the seconds of the steps of scripts/bench/bench_step.py, the decode steps of
scripts/bench/bench_rollout.py, and how the plan of a step changes when one setting of it changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import ModelSizes, read_sizes
from training.preflight.plan import DECODED, GRADIENTS, Plan, plan
from training.preflight.seconds import decode_seconds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB = 2**30
PEAK = "driver's peak"


@dataclass(frozen=True)
class Workload:
    """A step that bench_step.py ran on an H200; `cap` is in GiB, None for the whole card."""

    recipe: str
    base: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    rank: int
    cap: int | None = None
    weights: str | None = None  # the masters' dtype, if whole weights are trained
    layers: int | None = None  # if they are fewer than the model's
    settings: tuple[str, ...] = ()  # key=value, of the recipe's other keys

    @property
    def sizes(self) -> ModelSizes:
        sizes = read_sizes(self.base)
        if self.layers is None:
            return sizes
        decoder = sizes.decoder
        sparse = tuple(layer for layer in decoder.sparse if layer < self.layers)
        return replace(sizes, layers=self.layers, decoder=replace(decoder, layers=self.layers, sparse=sparse))

    @property
    def description(self) -> str:
        cap = "" if self.cap is None else f", cap {self.cap} GiB"
        trained = f"rank {self.rank}" if self.weights is None else f"whole weights, masters in {self.weights}"
        layers = "" if self.layers is None else f", {self.layers} layers"
        settings = "".join(f", `{setting}`" for setting in self.settings)
        return (
            f"{self.base.partition('/')[2]} shapes{layers}, {trained}, {self.prompts} x {self.group} completions, "
            f"{self.prompt_tokens} + {self.new_tokens} tokens{settings}{cap}"
        )

    def plan(self, gpu: str = "h200") -> Plan:
        values = {
            "rollout.prompts_per_step": self.prompts,
            "rollout.group_size": self.group,
            "rollout.max_new_tokens": self.new_tokens,
            "data.max_prompt_tokens": self.prompt_tokens,
            "adapter.rank": self.rank,
            "memory.cap_gib": "null" if self.cap is None else self.cap,
        }
        if self.weights:
            values |= {"qat.mode": "weights", "qat.masters": self.weights, "noise.enabled": "false"}
        config = load_recipe(self.recipe, [*(f"{key}={value}" for key, value in values.items()), *self.settings])
        return plan(config, self.sizes, card_of(gpu))


A = Workload("dapo_7b", "Qwen/Qwen2.5-7B", 16, 8, 128, 512, 32)
WORKLOADS = {  # by the name of the benchmark's file
    "step-7b-qerl": A,
    "step-7b-qerl-cap24": replace(A, cap=24),
    "qat/qat-7b": replace(A, weights="float32"),
    "fp8/step-7b-bf16": replace(A, settings=("model.format=bf16",)),
    "fp8/step-7b-fp8": replace(A, settings=("model.format=fp8_block",)),
    "fp8/step-7b-fp8-blockwise": replace(A, settings=("model.format=fp8_block", "train.fp8_recipe=blockwise")),
    "peers/step-7b-qerl-fp8-gradients": replace(A, settings=("train.fp8_recipe=tensorwise_gradients",)),
    "experts/step-a3b-qerl-cap80": Workload("dapo_7b", "Qwen/Qwen3-30B-A3B", 16, 8, 128, 512, 16, 80),
    "experts/step-a3b-16-layers-qerl": Workload("dapo_7b", "Qwen/Qwen3-30B-A3B", 16, 8, 128, 512, 16, layers=16),
    "hybrid/step-9b-qerl": replace(A, base="Qwen/Qwen3.5-9B", settings=("run.micro_batch_tokens=16384",)),
    "hybrid/step-27b-qerl-cap80": replace(
        A, base="Qwen/Qwen3.5-27B", cap=80, settings=("run.micro_batch_tokens=4096",)
    ),
    "step-32b-qerl-cap80": Workload("dapo_32b", "Qwen/Qwen2.5-32B", 8, 8, 256, 2048, 16, 80),
    "step-70b-qerl-cap80": Workload("dapo_32b", "meta-llama/Llama-3.1-70B", 4, 8, 256, 512, 16, 80),
}


@dataclass(frozen=True)
class Compared:
    """GiB or seconds of one thing, as planned and as measured in a run."""

    what: str
    planned: float
    measured: float


def read(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))


def compare(name: str, workload: Workload) -> list[Compared]:
    """Planned against measured memory.

    These are the driver's peak of the whole card, which is compared with the larger phase, and if the run logged memory
    by phase, the card's use during rollouts and what training allocates on top of what is there before.
    """
    result = read(name)
    made, steps = workload.plan(), result["steps"]
    driver = result.get("peak_driver_gib", max(step.get("memory/peak_gib", 0) for step in steps))  # if it was cut off
    peak = Compared(PEAK, max(made.peak(phase) for phase in made.memory) / GIB, driver)
    if "memory/rollout_card_gib" not in steps[0]:
        return [peak]
    rollout, training = (max(s[f"memory/{key}_gib"] for s in steps) for key in ("rollout_card", "train"))
    rows = made.memory["training"]  # in a dense model an adapter's gradients and what is decoded are in the first
    allocated = sum(rows.get(name, 0) for name in ("micro-batch", GRADIENTS, DECODED))
    return [
        Compared("card in a rollout", made.peak("rollout") / GIB, rollout),
        Compared("allocated by training", allocated / GIB, training),
        peak,
    ]


def table() -> str:
    """A Markdown table with one line per workload and thing compared."""
    lines = ["| workload | what | planned | measured | difference |", "|---|---|---|---|---|"]
    for name, load in WORKLOADS.items():
        lines += [row(f"`{name}.json`: {load.description}", one, "{:.1f} GiB") for one in compare(name, load)]
    return "\n".join(lines)


def row(label: str, one: Compared, form: str) -> str:
    planned, measured = form.format(one.planned), form.format(one.measured)
    return f"| {label} | {one.what} | {planned} | {measured} | {one.planned / one.measured - 1:+.1%} |"


def compare_seconds(name: str, workload: Workload) -> list[Compared]:
    """Planned against measured seconds by phase: means over the steps, without the first if there are others."""
    made, steps = workload.plan(), counted(read(name)["steps"])
    keys = {"rollout": "time/rollout_s", "training": "time/train_s"}
    return [Compared(phase, made.seconds[phase], mean(step[key] for step in steps)) for phase, key in keys.items()]


def counted(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return steps[1:] or steps


def seconds_table() -> str:
    lines = ["| workload | phase | planned | measured | difference |", "|---|---|---|---|---|"]
    for name, load in WORKLOADS.items():
        steps = counted(read(name)["steps"])
        which = "the first step" if steps[0]["step"] == 1 else f"mean of {len(steps)}" if len(steps) > 1 else "one step"
        label = f"`{name}.json`: {load.description}, {which}"
        lines += [row(label, one, "{:.1f} s") for one in compare_seconds(name, load)]
    return "\n".join(lines)


def decode_table() -> str:
    """Decode steps with an adapter, by model and number of sequences, in which bench_rollout adds 128 tokens to 128."""
    lines = ["| model | sequences | planned | measured | difference |", "|---|---|---|---|---|"]
    for shape in ("7b", "32b"):
        sizes = read_sizes(f"Qwen/Qwen2.5-{shape.upper()}")
        for count, rate in read(f"rollout-{shape}-qerl")["decode_tokens_per_s"].items():
            sequences = int(count)
            planned = decode_seconds(sizes, card_of("h200"), "nvfp4", sequences, sequences * 192 * sizes.kv_bytes())
            one = Compared(count, 1e3 * planned, 1e3 * sequences / rate)
            lines.append(row(f"Qwen2.5-{shape.upper()}", one, "{:.2f} ms"))
    return "\n".join(lines)


def scaled_table() -> str:
    """Planned seconds of the 7B workload on an H200, and of the same workload with one setting changed."""
    changes: dict[str, dict[str, Any]] = {
        A.description: {},
        "32 prompts": {"prompts": 32},
        "16 completions per prompt": {"group": 16},
        "prompts of 256 tokens": {"prompt_tokens": 256},
        "completions of 1024 tokens": {"new_tokens": 1024},
        "rank 64": {"rank": 64},
        "Qwen2.5-14B shapes": {"base": "Qwen/Qwen2.5-14B"},
        "Qwen2.5-32B shapes": {"base": "Qwen/Qwen2.5-32B"},
        "a cap of 24 GiB": {"cap": 24},
    }
    lines = ["| | rollout | training | most memory |", "|---|---|---|---|"]
    for label, changed in changes.items():
        made = replace(A, **changed).plan()
        seconds = [f"{made.seconds[phase]:.1f} s" for phase in ("rollout", "training")]
        peak = max(made.peak(phase) for phase in made.memory) / GIB
        lines.append(f"| {label} | {' | '.join(seconds)} | {peak:.1f} GiB |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), seconds_table(), decode_table(), scaled_table(), sep="\n\n")
