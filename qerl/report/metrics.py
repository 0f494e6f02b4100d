"""The names of metrics: a run's, and TRL's."""

import math
from collections.abc import Mapping
from typing import Any

# TRL's name -> ours, or None to drop it; a metric that is not listed keeps its name.
NAMES = {
    "clip_ratio/low_mean": "clip/low_share",
    "clip_ratio/high_mean": "clip/high_share",
    "clip_ratio/region_mean": "clip/share",
    "cispo_clip_ratio": "clip/high_share",  # cispo has only an upper bound
    "clip_ratio/low_min": None,
    "clip_ratio/high_max": None,
    "epoch": None,
}
# A run logs these names and those that begin with these prefixes, and no others; a test compares them with a run.
# grades/ is not among them: the accuracy reward logs it, and so may a reward that builds on accuracy.
RUN_METRICS = (
    *("step", "loss", "reward", "reward_std", "nll", "entropy", "entropy_coef", "policy_loss", "aux_loss", "kl"),
    *("update_kl", "mismatch_kl", "grad_norm", "learning_rate", "tokens_total"),
)
RUN_FOLDERS = (
    *("kl_to_teacher/", "rows/", "rewards/", "sampled/", "completions/", "groups/", "clip/", "clip_ratio/"),
    *("sampling/", "mismatch/", "correction/", "vespo/", "noise/", "dynamic_sampling/", "environment/"),
    *("carry_over/", "sources/", "curriculum/"),
    *("validation/", "time/", "speed/", "memory/"),
)
MACHINE_PREFIXES = ("time/", "speed/", "memory/")


def rename(logs: Mapping[str, float | None]) -> dict[str, float | None]:
    """TRL's metrics by our names, without those that repeat others. What is not finite becomes None (JSON null)."""
    renamed = {}
    for key, value in logs.items():
        if (name := NAMES.get(key, key)) is not None:
            renamed[name] = value if value is None or math.isfinite(value) else None
    return renamed


def is_own(name: str) -> bool:
    """Whether the run itself logs a metric of that name."""
    return name in (*RUN_METRICS, *NAMES) or name.startswith(RUN_FOLDERS)


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.startswith(MACHINE_PREFIXES)}
