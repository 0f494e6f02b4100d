"""Compare two evaluations of the same questions: is the second better or worse, or can it not be told?

    one completion per question   exact McNemar test on the questions that only one of the two has right; Newcombe's
                                  interval of the difference (Statistics in Medicine 17, 1998, 2635-2650, method 10)
    several                       sign-flip test on the per-question differences of mean@n; Gaffke's bounds for the
                                  mean of these differences, which lie between -1 and 1

The verdict is "better" or "worse" only if the test gives p < 0.05 and the interval excludes zero: the two rest on
different approximations, and a claim should survive both. Evaluations with different questions or settings are refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from eval.result import COMPLETIONS, RESULT, SETTINGS, differences
from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.base.files import no_folder
from qerl.base.read_back import OF_EVALUATION, Shape, read_object, read_rows
from qerl.data.grading.intervals import estimate, wilson

SAME = ("task", "questions", "data", "grader", "samples", "temperature", "top_p", "max_new_tokens")
PROMPT = ("system_prompt", "prompt_template")
NAMED = ("seed", "engine", "dtype", "kernel", "batch_size")  # these may differ, and the table then names them
FLIPS, CHUNK, SEED = 10_000, 500, 0
GAFFKE = "Gaffke's bounds over questions"
LEVEL = 0.05

Verdict = Literal["better", "worse", "cannot tell"]


@dataclass(frozen=True)
class PairedTest:
    """Second minus first: mean `difference` over questions, its 95% interval, and the two-sided p value."""

    difference: float
    low: float
    high: float
    p_value: float
    test: str
    interval: str

    @property
    def verdict(self) -> Verdict:
        """What can be said of the second evaluation."""
        if self.p_value >= LEVEL or self.low <= 0 <= self.high:
            return "cannot tell"
        return "better" if self.difference > 0 else "worse"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two results on the same questions. The first is ahead on `only_first` of them, the second on `only_second`."""

    task: str
    models: tuple[str, str]
    accuracies: tuple[float, float]
    questions: int
    samples: int
    only_first: int
    only_second: int
    paired: PairedTest
    also_different: str  # "" or settings that differ without forbidding the comparison

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.paired.verdict}

    @property
    def verdict(self) -> Verdict:
        """What can be said of the second evaluation."""
        return self.paired.verdict

    def __repr__(self) -> str:
        return f"Comparison({self.task}, the second: {self.sentence()})"

    def sentence(self) -> str:
        """The verdict and its numbers in one line."""
        paired = self.paired
        return (
            f"{paired.verdict}. {100 * paired.difference:+.1f} points on the same {self.questions} questions, 95% "
            f"interval {100 * paired.low:+.1f} to {100 * paired.high:+.1f} ({paired.interval}), p = "
            f"{paired.p_value:.2g} ({paired.test})"
        )

    def table(self) -> Table:
        """The numbers and the verdict as a table."""
        paired = self.paired
        table = Table("", "", title=self.task, box=box.SIMPLE_HEAD, show_header=False)
        rows = [
            ("first", f"{self.accuracies[0]:.1%}  {self.models[0]}"),
            ("second", f"{self.accuracies[1]:.1%}  {self.models[1]}"),
            ("second - first", f"{100 * paired.difference:+.1f} points"),
            ("95% interval", f"{100 * paired.low:+.1f} to {100 * paired.high:+.1f} points ({paired.interval})"),
            ("p value", f"{paired.p_value:.3g} ({paired.test})"),
            ("questions", f"{self.questions}; first ahead on {self.only_first}, second on {self.only_second}"),
            ("the second is", paired.verdict),
        ]
        if self.also_different:
            rows.append(("also different", self.also_different))
        for label, value in rows:
            table.add_row(label, Text(value))
        return table


def compare(first: Path, second: Path) -> Comparison:
    """Compare two evaluation folders.

    Raises ConfigError if they did not ask the same, CheckpointError if one is not finished, DataError if its files are
    damaged.
    """
    results = [_read(path) for path in (first, second)]
    _check_same(first, second, *results)
    values = [question_means(rows) for _, rows in results]
    (one, _), (two, _) = results
    first_Q, second_Q = ([value[row] for row in sorted(values[0])] for value in values)
    samples = one["samples"]
    named = [{key: result["identity"].get(key) for key in NAMED} for result in (one, two)]
    return Comparison(
        task=one["task"],
        models=(one["model"], two["model"]),
        accuracies=(math.fsum(first_Q) / len(first_Q), math.fsum(second_Q) / len(second_Q)),
        questions=len(first_Q),
        samples=samples,
        only_first=sum(a > b for a, b in zip(first_Q, second_Q, strict=True)),
        only_second=sum(b > a for a, b in zip(first_Q, second_Q, strict=True)),
        paired=mcnemar(first_Q, second_Q) if samples == 1 else sign_flips(first_Q, second_Q),
        also_different=differences(*named),
    )


def mcnemar(first_Q: Sequence[float], second_Q: Sequence[float]) -> PairedTest:
    """Exact test and interval, for one graded completion (0 or 1) per question and model."""
    pairs = list(zip(first_Q, second_Q, strict=True))
    only_first = sum(a > b for a, b in pairs)
    only_second = sum(b > a for a, b in pairs)
    both = sum(a == b == 1 for a, b in pairs)
    low, high = newcombe(both, only_second, only_first, len(pairs) - both - only_first - only_second)
    difference = (only_second - only_first) / len(pairs)
    return PairedTest(difference, low, high, sign_test(only_first, only_second), "exact McNemar", "Newcombe, paired")


def sign_test(wins: int, losses: int) -> float:
    """The two-sided binomial p value of `wins` among wins + losses, at probability 1/2."""
    count = wins + losses
    tail = sum(math.comb(count, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**count)


def newcombe(both: int, first_only: int, second_only: int, neither: int) -> tuple[float, float]:
    """95% interval of p(first) - p(second) for paired proportions, Newcombe 1998, method 10."""
    count = both + first_only + second_only + neither
    sides = (both + first_only, both + second_only)
    (p, q) = (side / count for side in sides)
    (p_low, p_high), (q_low, q_high) = (wilson(value, count) for value in (p, q))
    spread = math.prod((sides[0], count - sides[0], sides[1], count - sides[1]))
    product = both * neither - first_only * second_only
    if product > 0:
        product = max(product - count / 2, 0)
    phi = product / math.sqrt(spread) if spread else 0.0
    below, above = (p - p_low, q_high - q), (p_high - p, q - q_low)
    half = [math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)) for a, b in (below, above)]
    return max(-1.0, p - q - half[0]), min(1.0, p - q + half[1])


def sign_flips(first_Q: Sequence[float], second_Q: Sequence[float]) -> PairedTest:
    """Sign-flip test, from a fixed seed, and interval of the mean per-question difference, for means in [0, 1]."""
    import numpy as np

    difference_Q = np.asarray(second_Q) - np.asarray(first_Q)
    mean, count = float(difference_Q.mean()), len(difference_Q)
    rng = np.random.default_rng(SEED)
    flipped = [(rng.integers(0, 2, (CHUNK, count)) * 2 - 1) @ difference_Q / count for _ in range(FLIPS // CHUNK)]
    beyond = int((np.abs(np.concatenate(flipped)) >= abs(mean) - 1e-12).sum())
    low, high = mean_difference(difference_Q.tolist())
    return PairedTest(mean, low, high, (1 + beyond) / (1 + FLIPS), "sign flips", GAFFKE)


def mean_difference(differences_Q: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of differences in [-1, 1], of which these were drawn.

    A bootstrap would give an interval of no width where all that were drawn are equal, and far too narrow a one where
    a rare question changes much, because none such may be among those that were asked.
    """
    between = estimate([min(1.0, max(0.0, round((value + 1) / 2, 12))) for value in differences_Q])
    return 2 * between.low - 1, 2 * between.high - 1


def question_means(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The share of correct completions of each row of the data."""
    graded: dict[int, list[bool]] = {}
    for row in rows:
        graded.setdefault(row["row"], []).append(row["correct"])
    return {row: sum(marks) / len(marks) for row, marks in graded.items()}


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """result.json and the rows of an evaluation's folder (or of its result.json)."""
    folder = path.parent if path.name == RESULT else path
    if not os.path.isfile(folder / RESULT):
        raise _no_evaluation(folder)
    result = read_object(folder / RESULT, _Result, OF_EVALUATION)
    rows = read_rows(folder / COMPLETIONS, _Graded, OF_EVALUATION)
    if not rows or len(rows) != result["completions"]:
        raise CheckpointError(
            f"{path} is no finished evaluation ({len(rows)} completions where {result['completions']} were graded): "
            "give a folder in which `qerl eval` ended"
        )
    return result, rows


def _no_evaluation(folder: Path) -> CheckpointError:
    """The error for a folder without a result, which names the evaluation that may be meant."""
    if (folder / SETTINGS).is_file():
        return CheckpointError(
            f"the evaluation in {folder} did not end: repeat the `qerl eval` that writes there, it continues"
        )
    what = f"{folder} holds no evaluation" if os.path.exists(folder) else no_folder(str(folder))
    inner = [file.parent for depth in ("*", "*/*") for file in sorted(folder.glob(f"{depth}/{RESULT}"))]
    if inner:
        return CheckpointError(f"{what}, but {inner[-1]} does: give that")
    first = f"write `qerl eval TASK --model {folder}` first, or " if (folder / "config.yaml").is_file() else ""
    return CheckpointError(f"{what}: {first}give a folder in which `qerl eval` ended")


class _Result(Shape):
    """What a comparison needs of result.json."""

    task: str
    model: str
    samples: int
    completions: int
    identity: dict[str, Any]


class _Graded(Shape):
    """What a comparison needs of a line of completions.jsonl."""

    row: int
    correct: bool


def _check_same(first: Path, second: Path, one: tuple[dict, list], two: tuple[dict, list]) -> None:
    asked = [
        {**{key: result["identity"].get(key) for key in SAME}, **{key: result.get(key) for key in PROMPT}}
        for result, _ in (one, two)
    ]
    if asked[0] != asked[1]:
        raise ConfigError(
            f"{first} and {second} did not ask the same ({differences(*asked)}): evaluate both models with equal "
            "--data, --limit, prompt and sampling options"
        )
    rows = [{row["row"] for row in rows} for _, rows in (one, two)]
    if rows[0] != rows[1]:
        raise DataError(
            f"{first} and {second} hold answers to other rows of the data ({sorted(rows[0] ^ rows[1])[:5]}), though "
            "they asked the same: one is damaged; repeat its `qerl eval` with --overwrite"
        )
