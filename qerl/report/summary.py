"""The numbers in the tables: first steps against last, time and memory by phase, configurations side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qerl.report.read import Row, Run

CHANGES = (
    ("loss of the learned tokens", "nll"),
    ("KL to the teacher", "kl_to_teacher/forward"),
    ("KL from the teacher (reverse)", "kl_to_teacher/reverse"),
    ("reward", "reward"),
    ("reward of all that was sampled", "sampled/reward"),
    ("accuracy", "rewards/accuracy"),
    ("entropy", "entropy"),
    ("tokens per completion", "completions/mean_tokens"),
    ("truncated share", "completions/truncated_share"),
    ("mismatch_kl", "mismatch_kl"),
    ("experts chosen otherwise", "mismatch/router_changed"),
    ("effective sample size", "correction/ess"),
    ("seconds per step", "time/step_s"),
)
REWARDS = 4  # the place in CHANGES after which the rewards of sources stand
PHASES = (
    ("rollout", "time/rollout_s"),
    ("waking and sleeping", "time/switch_s"),
    ("adapter sync", "time/sync_s"),
    ("grading", "time/reward_s"),
    ("teacher", "time/teacher_s"),
    ("forward", "time/forward_s"),
    ("backward", "time/backward_s"),
    ("optimizer", "time/optimizer_s"),
)
TRAINING = "time/train_s"  # includes packing; older versions logged this instead of the training phases

SOURCE = re.compile(r"sources/([^/]+)/share")

Table = tuple[list[str], list[list[str]]]  # heading, cells


class Change(NamedTuple):
    """The means of a metric over the first and over the last fifth of the steps."""

    label: str
    first: float
    last: float


class Phase(NamedTuple):
    """Seconds of one phase: the mean per step, the total, and the share of all time."""

    name: str
    mean_s: float
    total_s: float
    share: float


def fifth(rows: Sequence[Row]) -> int:
    """How many steps a fifth of the run has."""
    return max(1, len(rows) // 5)


def changes(rows: Sequence[Row]) -> list[Change]:
    """How the metrics changed; those that are missing at the start or at the end are left out."""
    width = fifth(rows)
    found = []
    of_sources = [(f"reward of {name}", f"sources/{name}/reward") for name in source_names(rows)]
    for label, key in (*CHANGES[:REWARDS], *of_sources, *CHANGES[REWARDS:]):
        first, last = (_mean(part, key) for part in (rows[:width], rows[-width:]))
        if first is not None and last is not None:
            found.append(Change(label, first, last))
    return found


def source_names(rows: Sequence[Row]) -> list[str]:
    """The sources of a run, in the order of their names; none of a run with one."""
    found = (SOURCE.fullmatch(key) for row in rows for key in row)
    return sorted({match[1] for match in found if match})


def phases(rows: Sequence[Row]) -> list[Phase]:
    """Where the time of a run went; the last entry is what no phase accounts for.

    Means are over all steps, including steps that had no rollout of their own.
    """
    timed = [row for row in rows if row.get("time/step_s") is not None]
    whole = sum(row["time/step_s"] for row in timed)
    if not whole:
        return []
    logged = {key for row in timed for key in row}
    totals = {name: sum(row.get(key) or 0.0 for row in timed) for name, key in PHASES if key in logged}
    if unsplit := [row[TRAINING] for row in timed if "time/optimizer_s" not in row and row.get(TRAINING)]:
        totals["training"] = sum(unsplit)
    rest = "the rest" if "grading" in totals else "grading and the rest"
    totals[rest] = max(0.0, whole - sum(totals.values()))
    return [Phase(name, total / len(timed), total, total / whole) for name, total in totals.items()]


def memory(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """The name, the mean and the maximum in GiB of each metric under memory/."""
    keys = sorted({key for row in rows for key in row if key.startswith("memory/") and key.endswith("_gib")})
    found = []
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        name = key.removeprefix("memory/").removesuffix("_gib").replace("_", " ")
        found.append((name, sum(values) / len(values), max(values)))
    return found


def rounded(value: float) -> str:
    """A number with three digits that count, without an exponent from 0.001 to a million."""
    size = abs(float(f"{value:.3g}"))  # 0.99999 is shown as 1.00
    if size >= 1e6 or 0 < size < 0.001:
        return f"{value:.1e}"
    return f"{value:,.{0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def change_table(runs: Sequence[Run]) -> Table:
    """The changes of each run, side by side."""
    columns = [{change.label: change for change in changes(run.rows)} for run in runs]
    heading = [f"{end} steps{_of(run, runs)}" for run in runs for end in ("first", "last")]
    cells = []
    for label in [label for label, _ in CHANGES if any(label in column for column in columns)]:
        ends = [column[label][1:] if label in column else (None, None) for column in columns]
        cells.append([label, *("" if value is None else rounded(value) for pair in ends for value in pair)])
    return ["mean", *heading], cells


def phase_table(runs: Sequence[Run]) -> Table | None:
    """Time by phase, side by side; None if no run logged times."""
    columns = [{phase.name: phase for phase in phases(run.rows)} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heading = [f"{what}{_of(run, runs)}" for run in runs for what in ("seconds per step", "in all", "share")]
    cells = []
    for name in names:
        found = [column.get(name) for column in columns]
        texts = [("", "", "") if each is None else _phase_cells(each) for each in found]
        cells.append([name, *(text for triple in texts for text in triple)])
    return (["phase", *heading], cells) if cells else None


def memory_table(runs: Sequence[Run]) -> Table | None:
    """Mean and maximum GPU memory, side by side; None if no run logged any."""
    columns = [{name: (mean, largest) for name, mean, largest in memory(run.rows)} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heading = [f"{what}{_of(run, runs)}" for run in runs for what in ("mean", "largest")]
    cells = []
    for name in names:
        texts = [[f"{value:.1f}" for value in column[name]] if name in column else ["", ""] for column in columns]
        cells.append([name, *(text for pair in texts for text in pair)])
    return (["GPU memory (GiB)", *heading], cells) if cells else None


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """One row per configuration key in which the runs differ: the key, then its value in each run."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, "") for config in flat]) for key in keys if key != "run.out"]
    return [[key, *values] for key, values in rows if len(set(values)) > 1]


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f", {run.name}" if len(runs) > 1 else ""


def _phase_cells(phase: Phase) -> tuple[str, str, str]:
    return rounded(phase.mean_s), f"{phase.total_s:,.0f} s", f"{phase.share:.0%}"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else str(value)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None
