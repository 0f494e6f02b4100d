"""A run of a few seconds on a random base, which the tests of the trainer share."""

import json
from itertools import islice
from pathlib import Path

import torch

from qerl.checkpoint.adapter_file import read_adapter
from qerl.config.recipe import load_recipe
from qerl.data.tasks import get_task
from qerl.report.metrics import deterministic
from training.run_dir.log import read_metrics

REWARD = Path(__file__).with_name("digits.py")
ROWS = 48
SETTINGS = (
    "adapter.start=none",  # most bases here have none, which would be said each time
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "run.micro_batch_tokens=56",
    "run.save_every=2", "noise.num_stages=3", "noise.sigma_start=0.05", "noise.sigma_end=0.01", "data.limit=12",
    "loss.mask_truncated=false", "optim.warmup_ratio=0", "logging.completions_every=2",
)  # fmt: skip


def small_config(base, folder, *overrides, steps=6, out="run"):
    """A smaller version of the tiny recipe on `base` with a dense reward: that of `folder`'s reward.py, if it has one.

    All other runs share one file, and therefore the process that calls its function. The task's first rows come from a
    file, since generating all 8192 takes as long as six steps.
    """
    reward, rows = folder / "reward.py", folder / "rows.jsonl"
    reward = reward if reward.exists() else REWARD
    rows.write_text("".join(json.dumps(row) + "\n" for row in islice(get_task("arith").generate("train"), ROWS)))
    given = (f"rewards=[{{name: '{reward}:digits'}}]", f"data.source={rows}")
    return load_recipe("tiny", [*SETTINGS, *given, *overrides], base=str(base), steps=steps, out=str(folder / out))


def numbers(run_dir):
    """The rows of a run's log without times and memory."""
    return [deterministic(row) for row in read_metrics(run_dir)]


def same_adapters(one, other):
    first, second = read_adapter(one)[0], read_adapter(other)[0]
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
