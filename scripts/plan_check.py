"""What `qerl plan` says of the workloads that scripts/bench_step.py measured, beside what it measured (benchmarks/).

python scripts/plan_check.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qerl.plan import Plan, card_of, plan
from qerl.recipe import load_recipe
from qerl.sizes import read_sizes

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
GIB = 2**30
PEAK = "driver's peak"


@dataclass(frozen=True)
class Workload:
    """A step as bench_step.py ran it on an H200; `cap` in GiB, None: the whole card."""

    recipe: str
    base: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    rank: int
    cap: int | None = None

    def plan(self, gpu: str = "h200") -> Plan:
        values = {
            "rollout.prompts_per_step": self.prompts,
            "rollout.group_size": self.group,
            "rollout.max_new_tokens": self.new_tokens,
            "data.max_prompt_tokens": self.prompt_tokens,
            "adapter.rank": self.rank,
            "memory.cap_gib": "null" if self.cap is None else self.cap,
        }
        config = load_recipe(self.recipe, [f"{key}={value}" for key, value in values.items()])
        return plan(config, read_sizes(self.base), card_of(gpu))


WORKLOADS = {  # by benchmark
    "step-7b-qerl": Workload("dapo_7b", "Qwen/Qwen2.5-7B", 16, 8, 128, 512, 32),
    "step-7b-qerl-cap24": Workload("dapo_7b", "Qwen/Qwen2.5-7B", 16, 8, 128, 512, 32, 24),
    "step-32b-qerl-cap80": Workload("dapo_32b", "Qwen/Qwen2.5-32B", 8, 8, 256, 2048, 16, 80),
    "step-70b-qerl-cap80": Workload("dapo_32b", "meta-llama/Llama-3.1-70B", 4, 8, 256, 512, 16, 80),
}


@dataclass(frozen=True)
class Compared:
    """GiB that were planned and that a run measured, of one thing."""

    what: str
    planned: float
    measured: float


def compare(name: str, workload: Workload) -> list[Compared]:
    """By phase where the run logged that: the card's use during rollouts, and what training allocates above all that is
    there before it; and the driver's peak of the whole card against the larger phase, which is all of older files."""
    result = json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))
    made, steps = workload.plan(), result["steps"]
    peak = Compared(PEAK, max(made.peak(phase) for phase in made.memory) / GIB, result["peak_driver_gib"])
    if "memory/rollout_card_gib" not in steps[0]:
        return [peak]
    rollout, training = (max(s[f"memory/{key}_gib"] for s in steps) for key in ("rollout_card", "train"))
    return [
        Compared("card in a rollout", made.peak("rollout") / GIB, rollout),
        Compared("allocated by training", made.memory["training"]["micro-batch"] / GIB, training),
        peak,
    ]


def table() -> str:
    """A Markdown table, a line a workload and thing compared."""
    lines = ["| workload | what | planned | measured | difference |", "|---|---|---|---|---|"]
    for name, load in WORKLOADS.items():
        cap = "" if load.cap is None else f", cap {load.cap} GiB"
        told = (
            f"`{name}.json`: {load.base.partition('/')[2]} shapes, rank {load.rank}, {load.prompts} x {load.group} "
            f"completions, {load.prompt_tokens} + {load.new_tokens} tokens{cap}"
        )
        for one in compare(name, load):
            difference = f"{one.planned / one.measured - 1:+.1%}"
            lines.append(f"| {told} | {one.what} | {one.planned:.1f} GiB | {one.measured:.1f} GiB | {difference} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
