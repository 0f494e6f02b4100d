"""From graded completions to numbers: the summary of an evaluation, its JSON form, and the table for people.

result.json, from which reports are made (shares are of completions, intervals are 95%):

    task, model, step                    name, one line, optimizer step of the checkpoint or null
    questions, samples, completions, correct
    accuracy {value, low, high}          mean over questions (mean@n); `interval` says how low and high were made
    pass_at_k {"4": {value, low, high}}  only for the k that were asked for
    mean_environment_reward              only of an evaluation against an environment
    mean_score                           only of a grader of the user's own
    truncated_share, no_answer_share, unparsed_share, reasons {reason: completions}
    prompt_tokens, completion_tokens, seconds, tokens_per_second
    base, adapter, format, data, system_prompt, prompt_template, settings, sampling, engine {name, kernel, versions}
    identity                             what decides the numbers (eval/identity.py): equal identities give equal rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store import Row
from qerl.data.grading.intervals import MANY_SAMPLES, ONE_SAMPLE, Estimate, estimate, pass_at_k

if TYPE_CHECKING:
    from rich.table import Table

UNPARSED = ("no_answer", "unparsable", "too_long")  # no answer could be read from the completion
OPTIONAL = ("mean_score", "mean_environment_reward")
RARE = ("unparsable", "too_long", "timeout", "bad_answer")  # the table names these only where they occur


@dataclass(frozen=True)
class Summary:
    """The numbers of an evaluation. Shares are of completions; `accuracy` is the mean over questions (mean@n)."""

    questions: int
    samples: int
    correct: int
    accuracy: Estimate
    interval: str  # how the intervals were made
    pass_at_k: dict[int, Estimate]
    truncated_share: float
    no_answer_share: float
    reasons: dict[str, int]  # completions by the reason of their grade (qerl.data.grading.grade.Reason)
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # spent sampling and grading, over all sessions
    mean_score: float | None = None  # of a grader of the user's own, which may give numbers between 0 and 1
    mean_environment_reward: float | None = None  # of an evaluation by episodes

    @property
    def completions(self) -> int:
        return self.questions * self.samples


@dataclass(frozen=True)
class EvalResult:
    """A finished evaluation. `details` holds settings, model, engine, versions and identity, as plain JSON values."""

    task: str
    model: str
    out: Path
    summary: Summary
    details: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What result.json holds."""
        summary = self.summary
        return {
            "task": self.task,
            "model": self.model,
            **{name: value for name, value in asdict(summary).items() if name not in OPTIONAL or value is not None},
            "completions": summary.completions,
            "unparsed_share": sum(summary.reasons.get(reason, 0) for reason in UNPARSED) / summary.completions,
            "pass_at_k": {str(k): asdict(value) for k, value in summary.pass_at_k.items()},
            "tokens_per_second": _rate(summary),
            **self.details,
        }


def summarize(rows: Sequence[Row], pass_k: Sequence[int] = ()) -> Summary:
    """The numbers of rows, of which every question needs the same number of samples. Raises ValueError otherwise."""
    correct_Q: dict[int, list[bool]] = {}
    for row in rows:
        correct_Q.setdefault(row["row"], []).append(row["correct"])
    counts = {len(graded) for graded in correct_Q.values()}
    if len(counts) != 1:
        raise ValueError(f"questions with {sorted(counts)} samples: every question needs the same number")
    samples = counts.pop()
    hits_Q = [sum(graded) for graded in correct_Q.values()]
    seconds_of_batch = {row["batch"]: row["batch_seconds"] for row in rows}
    return Summary(
        questions=len(hits_Q),
        samples=samples,
        correct=sum(hits_Q),
        accuracy=estimate([hits / samples for hits in hits_Q]),
        interval=ONE_SAMPLE if samples == 1 else MANY_SAMPLES,
        pass_at_k={k: estimate([pass_at_k(samples, hits, k) for hits in hits_Q]) for k in pass_k},
        truncated_share=_share([row["truncated"] for row in rows]),
        no_answer_share=_share([row["reason"] == "no_answer" for row in rows]),
        reasons=dict(sorted(Counter(row["reason"] for row in rows).items())),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        completion_tokens=sum(row["tokens"] for row in rows),
        seconds=sum(seconds_of_batch.values()),
        mean_score=_mean(rows, "score"),
        mean_environment_reward=_mean(rows, "environment_reward"),
    )


def render_table(results: Sequence[EvalResult], names: Sequence[str] | None = None) -> Table:
    """A table for the terminal with one column per result, under `names` (default: the models)."""
    from rich import box
    from rich.table import Table

    table = Table(title=" / ".join(dict.fromkeys(result.task for result in results)), box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in names or [result.model for result in results]:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_cells(result.summary) for result in results]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "") for column in columns))
    return table


def _cells(summary: Summary) -> dict[str, str]:
    mean = "accuracy" if summary.samples == 1 else f"accuracy (mean@{summary.samples})"
    return {
        mean: f"{summary.accuracy.value:.1%}",
        "95% interval": _interval(summary.accuracy),
        **{f"pass@{k}": f"{e.value:.1%}  ({_interval(e)})" for k, e in summary.pass_at_k.items()},
        **({} if summary.mean_score is None else {"mean score": f"{summary.mean_score:.3f}"}),
        **(
            {}
            if summary.mean_environment_reward is None
            else {"environment's reward": f"{summary.mean_environment_reward:.3f}"}
        ),
        "correct": f"{summary.correct} of {summary.completions}",
        "truncated": f"{summary.truncated_share:.1%}",
        "no answer": f"{summary.no_answer_share:.1%}",
        **{
            reason.replace("_", " "): f"{n / summary.completions:.1%}"
            for reason, n in summary.reasons.items()
            if reason in RARE
        },
        "tokens per completion": f"{summary.completion_tokens / summary.completions:.1f}",
        "seconds": f"{summary.seconds:.1f}",
        "tokens per second": f"{_rate(summary):.0f}",
    }


def _interval(value: Estimate) -> str:
    return f"{value.low:.1%} to {value.high:.1%}"


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """The mean of a field that only some evaluations have."""
    return sum(row[key] for row in rows) / len(rows) if key in rows[0] else None


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def _rate(summary: Summary) -> float:
    return summary.completion_tokens / summary.seconds if summary.seconds else 0.0
