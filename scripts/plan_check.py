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


def measured_gib(name: str) -> float:
    """The driver's peak of the whole card."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))["peak_driver_gib"]


def planned_gib(made: Plan) -> float:
    """The larger phase's."""
    return max(made.peak(phase) for phase in made.memory) / GIB


def table() -> str:
    """A Markdown table, a line a workload."""
    lines = ["| workload | planned | measured | difference |", "|---|---|---|---|"]
    for name, workload in WORKLOADS.items():
        planned, measured = planned_gib(workload.plan()), measured_gib(name)
        lines.append(
            f"| `{name}.json`: {workload.base.partition('/')[2]} shapes, rank {workload.rank}, {workload.prompts} x "
            f"{workload.group} completions, {workload.prompt_tokens} + {workload.new_tokens} tokens"
            f"{'' if workload.cap is None else f', cap {workload.cap} GiB'} | {planned:.1f} GiB | {measured:.1f} GiB | "
            f"{planned / measured - 1:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
