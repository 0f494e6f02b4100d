"""Whether a run learned: one sentence, computed from its rewards and from evaluations before and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, variance
from typing import Literal

from qerl.report.read import Evaluation, Row, Run
from qerl.report.summary import fifth, rounded

LEARNED_FROM = (
    ("kl_to_teacher/forward", "KL to the teacher"),
    ("nll", "loss"),
    ("sampled/reward", "reward"),
    ("reward", "reward"),
)
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
    before, after = (_accuracy(each) for each in compared)
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
    apart = abs(last.value - first.value) > math.hypot(first.half, last.half)
    if not apart:
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
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _afterwards(run: Run) -> str:
    known = [each for each in run.evaluations if each.result.get("accuracy")]
    if len(known) == 1:
        found = f"Held-out accuracy on {known[0].result['task']} is {_accuracy(known[0])}"
        return f"{found}; what it was before training is not given (--before and --after)."
    if known:
        return "Held-out accuracies are below; none is compared with one before training (--before and --after)."
    return "Held-out accuracy was not given (--before and --after)."


def _accuracy(evaluation: Evaluation) -> str:
    accuracy = evaluation.result["accuracy"]
    return f"{accuracy['value']:.1%} ({accuracy['low']:.1%} to {accuracy['high']:.1%})"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
