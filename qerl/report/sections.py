"""The sections of a report, as tables and sentences: noise stages, evaluations, first steps against last, time and
memory, differing configurations, validations, and the verdict: whether the run learned."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, mean, variance
from typing import Any, Literal, NamedTuple

from qerl.report.read import LEARNED_FROM, Evaluation, Row, Run

Table = tuple[list[str], list[list[str]]]  # heading, cells

# The table's columns: (heading, metric, format).
COLUMNS = (
    ("entropy", "entropy", ".3f"),
    ("sampling entropy", "sampling/entropy", ".3f"),
    ("reward", "reward", ".3f"),
    ("mismatch_kl", "mismatch_kl", ".1e"),
    ("ess", "correction/ess", ".3f"),
)


def stages(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each stage of the noise, in order."""
    noisy = [row for row in rows if row.get("noise/stage") is not None]
    return [list(of) for _, of in groupby(noisy, key=lambda row: int(row["noise/stage"]))]


def stage_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """The stages of a run, without metrics that none of them logged; None for a run without noise."""
    found = stages(rows)
    if not any(row["noise/sigma"] for stage in found for row in stage):
        return None
    columns = [column for column in COLUMNS if any(_mean(stage, column[1]) is not None for stage in found)]
    cells = []
    for stage in found:
        sigmas = [row["noise/sigma"] for row in stage]
        # A range in a run of an older version, whose noise could follow a target.
        sigma = " to ".join(dict.fromkeys(f"{sigma:.2g}" for sigma in (min(sigmas), max(sigmas))))
        means = ("" if (value := _mean(stage, key)) is None else f"{value:{form}}" for _, key, form in columns)
        steps = f"{stage[0]['step']} to {stage[-1]['step']}"
        cells.append([str(int(stage[0]["noise/stage"])), steps, sigma, *means])
    return ["stage", "steps", "sigma", *(name for name, _, _ in columns)], cells


PAIRS_SHOWN = 3


class Pair(NamedTuple):
    """Two completions of the same question."""

    before: Row
    after: Row


def evaluation_cells(evaluation: Evaluation) -> dict[str, str]:
    """One row of the table, by heading; values that the result does not have are left out."""
    result = evaluation.result
    cells = {"evaluation": evaluation.name, "task": str(result["task"])}
    if result.get("accuracy"):  # the result of another suite may have other numbers instead
        cells["accuracy"] = f"{result['accuracy']['value']:.1%}"
        cells["95% interval"] = _interval(result["accuracy"])
    cells |= _suite_cells(result.get("scores") or {})
    for k, value in (result.get("pass_at_k") or {}).items():
        cells[f"pass@{k}"] = f"{value['value']:.1%} ({_interval(value)})"
    for heading, key in (("truncated", "truncated_share"), ("no answer", "no_answer_share")):
        if result.get(key) is not None:
            cells[heading] = f"{result[key]:.1%}"
    if result.get("questions") is not None:
        cells["questions"] = f"{result['questions']} x {result.get('samples', 1)}"
    if result.get("completion_tokens") is not None and result.get("completions"):
        cells["tokens per completion"] = f"{result['completion_tokens'] / result['completions']:,.0f}"
    return {**cells, "model": str(result.get("model", "")).partition(", ")[0]}  # without its start and adapter


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Heading and cells; a column that a result does not have is empty in its row."""
    rows = [evaluation_cells(evaluation) for evaluation in evaluations]
    heading = list(dict.fromkeys(name for row in rows for name in row))
    return heading, [[row.get(name, "") for name in heading] for row in rows]


def pairs(before: Evaluation, after: Evaluation) -> list[Pair]:
    """Completions of the same question before and after, preferably questions that turned from wrong to right."""
    first, second = ({(row["id"], row["sample"]): row for row in each.rows} for each in (before, after))
    shared = [key for key in first if key in second]
    turned = [key for key in shared if second[key]["correct"] > first[key]["correct"]] or shared
    spread = turned[:: max(1, len(turned) // PAIRS_SHOWN)][:PAIRS_SHOWN]  # neighbours are alike in length and kind
    return [Pair(first[key], second[key]) for key in spread]


def mistakes(evaluation: Evaluation) -> list[Row]:
    """A few completions that were graded wrong, spread over the data."""
    wrong = [row for row in evaluation.rows if row.get("correct") is False]
    return wrong[:: max(1, len(wrong) // PAIRS_SHOWN)][:PAIRS_SHOWN]


def _suite_cells(scores: dict[str, dict[str, float]]) -> dict[str, str]:
    """The metrics of lighteval with their standard errors; if there are several tasks, with the task's name."""
    cells = {}
    for task, metrics in scores.items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                spread = "" if error is None else f" ± {error:.3f}"
                cells[name if len(scores) == 1 else f"{task} {name}"] = f"{value:.3f}{spread}"
    return cells


def _interval(value: dict[str, float]) -> str:
    return f"{value['low']:.1%} to {value['high']:.1%}"


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
    found = []
    for key in sorted({key for row in rows for key in row if key.startswith("memory/") and key.endswith("_gib")}):
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
    found = [{each.label: tuple(map(rounded, each[1:])) for each in changes(run.rows)} for run in runs]
    return beside("mean", ("first steps", "last steps"), runs, found, " to ") or (["mean"], [])


def phase_table(runs: Sequence[Run]) -> Table | None:
    """Time by phase, side by side; None if no run logged times."""
    found = [
        {each.name: (rounded(each.mean_s), f"{each.total_s:,.0f} s", f"{each.share:.0%}") for each in phases(run.rows)}
        for run in runs
    ]
    return beside("phase", ("seconds per step", "in all", "share"), runs, found)


def memory_table(runs: Sequence[Run]) -> Table | None:
    """Mean and maximum GPU memory, side by side; None if no run logged any."""
    found = [{name: (f"{mean:.1f}", f"{most:.1f}") for name, mean, most in memory(run.rows)} for run in runs]
    return beside("GPU memory (GiB)", ("mean", "largest"), runs, found)


def beside(
    corner: str,
    heading: Sequence[str],
    runs: Sequence[Run],
    found: Sequence[Mapping[str, tuple[str, ...]]],
    between: str = ", ",
) -> Table | None:
    """A table with the columns `heading`, or of several runs with a column each, whose cells hold what is `between` one
    another; `found` has the rows of each by name. None without a row."""
    names = dict.fromkeys(name for rows in found for name in rows)
    if not names:
        return None
    if len(runs) == 1:
        return [corner, *heading], [[name, *cells] for name, cells in found[0].items()]
    cells = [[name, *(between.join(rows.get(name, ())) for rows in found)] for name in names]
    return [f"{corner}: {between.join(heading)}", *(run.name for run in runs)], cells


Measured = tuple[str, dict[str, float]]  # when, and a share with the bounds of its 95% interval: value, low, high


def held_out(run: Run, compared: tuple[Evaluation, Evaluation] | None = None) -> list[Measured]:
    """Accuracy on held-out questions before and after: of the evaluations, else of the first and the last validation;
    empty if there are not two."""
    if compared:
        return [(when, each.result["accuracy"]) for when, each in zip(("before", "after"), compared, strict=True)]
    found = _validated(run)
    return [found[0], found[-1]] if len(found) > 1 else []


def _validated(run: Run) -> list[Measured]:
    names = {"value": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
    found = [
        (row["step"], {key: row.get(f"validation/{name}") for key, name in names.items()}) for row in run.validations
    ]
    return [(f"step {step}", share) for step, share in found if None not in share.values()]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """One row per configuration key in which the runs differ: the key, then its value in each run."""
    flat = [dict(flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, "") for config in flat]) for key in keys if key != "run.out"]
    return [[key, *values] for key, values in rows if len(set(values)) > 1]


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each value of nested sections as text, by its dotted key."""
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else str(value)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def validation_table(run: Run) -> Table | None:
    """One line per validation, with the best one marked; None for a run without.

    A run on given conversations measures the loss of held-out rows, others the accuracy of held-out questions.
    """
    if not (rows := run.validations):
        return None
    losses = any(row.get("validation/loss") is not None for row in rows)
    metric = "loss" if losses else (run.config.get("validation") or {}).get("metric") or "accuracy"
    key = f"validation/{metric}"
    found = {row["step"]: row[key] for row in rows if row["step"] and row.get(key) is not None}
    best = (min if losses else max)(found, key=found.get, default=None)
    heading = ["loss"] if losses else ["accuracy", "95% interval", "reward", "tokens", "truncated"]
    lines = []
    for row in rows:
        cells = [_shown(row, "loss")] if losses else _answers(row)
        seconds = row.get("time/validation_s")
        ending = ["" if seconds is None else f"{seconds:.1f}", "best" if row["step"] == best else ""]
        lines.append([str(row["step"]), *cells, *ending])
    return ["step", *heading, "seconds", ""], lines


def _answers(row: Row) -> list[str]:
    accuracy, low, high = (_shown(row, name, "{:.1%}") for name in ("accuracy", "accuracy_low", "accuracy_high"))
    interval = f"{low} to {high}" if low and high else ""
    lengths = _shown(row, "mean_tokens"), _shown(row, "truncated_share", "{:.1%}")
    return [accuracy, interval, _shown(row, "reward"), *lengths]


def _shown(row: Row, name: str, form: str | None = None) -> str:
    value = row.get(f"validation/{name}")
    return "" if value is None else form.format(value) if form else rounded(value)


ENOUGH = 5  # steps at each end, below which an interval would say little
LEADS = {
    "better": "It learned: held-out accuracy rose",
    "worse": "It got worse: held-out accuracy fell",
    "cannot tell": "Whether it learned cannot be told: held-out accuracy went",
    None: "Whether it learned was not tested: held-out accuracy went",
}


@dataclass(frozen=True)
class Judged:
    """What a paired test says of two evaluations; `outcome` is None if they cannot be compared, and `text` says why."""

    outcome: Literal["better", "worse", "cannot tell"] | None
    text: str


@dataclass(frozen=True)
class Mean:
    """A mean over steps with the half-width of its 95% interval (Student's t over steps); None for too few steps."""

    value: float
    half: float | None
    steps: int

    def __str__(self) -> str:
        if self.half is None:
            return rounded(self.value)
        return f"{rounded(self.value)} ({rounded(self.value - self.half)} to {rounded(self.value + self.half)})"


def verdict(run: Run, compared: tuple[Evaluation, Evaluation] | None = None, judged: Judged | None = None) -> str:
    """The sentence at the top of the report. Held-out questions decide if they were asked before and after training;
    a rising reward alone is named as such."""
    reward = reward_sentence(run.rows)
    if compared is None:
        return f"{reward} {_afterwards(run)}".strip()
    before, after = (_accuracy(each.result["accuracy"]) for each in compared)
    questions = compared[1].result.get("questions")
    of = f"{questions} questions of " if questions else ""
    lead = LEADS[judged.outcome if judged else None]
    return f"{lead} from {before} to {after} on {of}{compared[1].result['task']}. {reward}"


def reward_sentence(rows: Sequence[Row]) -> str:
    """What a run learns from in the first and in the last fifth of its steps: the KL to a teacher, or the mean reward,
    with dynamic sampling that of all samples."""
    name, values = _learned_from(rows)
    if not values:
        return "No reward was logged."
    width = fifth(values)
    first, last = mean_of(values[:width]), mean_of(values[-width:])
    if len(values) == 1:
        return f"The {name} of the only step is {first}."
    ends = f"from {first} in the first {_steps(width)} to {last} in the last {_steps(width)} of {len(values)}"
    if first.half is None or last.half is None:
        return f"The {name} went {ends}, too few steps for an interval."
    if abs(last.value - first.value) <= math.hypot(first.half, last.half):
        return f"The {name} did not change measurably: it went {ends}."
    return f"The {name} {'rose' if last.value > first.value else 'fell'} {ends}."


def _learned_from(rows: Sequence[Row]) -> tuple[str, list[float]]:
    """The first of LEARNED_FROM that half of the steps have, and its values; without one the reward's."""
    for key, name in LEARNED_FROM:
        values = [row[key] for row in rows if row.get(key) is not None]
        if len(values) >= max(1, len(rows) // 2):
            return name, values
    return name, values


def mean_of(values: Sequence[float]) -> Mean:
    """The mean with its interval. Steps are taken for independent: each has other prompts."""
    half = None
    if len(values) >= ENOUGH:
        half = student(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Mean(mean(values), half, len(values))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, for at least four degrees of freedom within 0.3% (Fisher's expansion)."""
    z = NormalDist().inv_cdf(0.975)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def _afterwards(run: Run) -> str:
    known = [each for each in run.evaluations if each.result.get("accuracy")]
    said = [sentence] if (sentence := _in_validation(run)) else []
    if len(known) == 1:
        found = f"Held-out accuracy on {known[0].result['task']} is {_accuracy(known[0].result['accuracy'])}"
        said += [f"{found}; what it was before training is not given (--before and --after)."]
    elif known:
        said += ["Held-out accuracies are below; none is compared with one before training (--before and --after)."]
    return " ".join(said) or "Held-out accuracy was not given (--before and --after)."


def _in_validation(run: Run) -> str:
    """What the first and the last validation found. An accuracy rose or fell if the two intervals lie apart."""
    went = "went"
    if found := _validated(run):
        name, (_, first), (_, last) = "accuracy", found[0], found[-1]
        if first["high"] < last["low"] or last["high"] < first["low"]:
            went = "rose" if first["high"] < last["low"] else "fell"
        said = [f"{_accuracy(share)} at {when}" for when, share in found]
    else:
        name, losses = "loss", [(row["step"], row.get("validation/loss")) for row in run.validations]
        said = [f"{rounded(loss)} at step {step}" for step, loss in losses if loss is not None]
    if len(said) > 1:
        return f"In validation, held-out {name} {went} from {said[0]} to {said[-1]}."
    return f"In validation, held-out {name} is {said[0]}." if said else ""


def _accuracy(share: Mapping[str, float]) -> str:
    return f"{share['value']:.1%} ({_interval(share)})"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
