"""The best and the worst of the completions that a run logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerl.report.read import Row, Run

SHOWN = 3
LONGEST = 6000  # characters of a completion that the page shows


@dataclass(frozen=True)
class Turn:
    """One message of an episode with an environment."""

    role: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Sample:
    """One completion. `reward` is the weighted sum that it was trained on."""

    step: int
    reward: float
    rewards: dict[str, Any]
    prompt: str
    completion: str
    turns: tuple[Turn, ...] = ()  # of an episode
    ended: str = ""


@dataclass(frozen=True)
class Extremes:
    """The best and the worst samples from the later half of the sampled steps; `count` is the number of all samples."""

    count: int
    from_step: int
    best: list[Sample]
    worst: list[Sample]


def extremes(run: Run) -> Extremes | None:
    """The extremes of a run; None if it logged no completions.

    A text that occurs several times counts once, and of samples with equal rewards the later one is shown.
    """
    found = [_sample(row, _weights(run, row.get("source"))) for row in run.samples]
    if not found:
        return None
    steps = sorted({sample.step for sample in found})
    from_step = steps[len(steps) // 2]
    late = {(sample.prompt, sample.completion): sample for sample in found if sample.step >= from_step}
    ranked = sorted(late.values(), key=lambda sample: (-sample.reward, -sample.step))
    count = min(SHOWN, (len(ranked) + 1) // 2)
    worst = sorted(ranked[count:], key=lambda sample: (sample.reward, -sample.step))
    return Extremes(len(found), from_step, ranked[:count], worst[:SHOWN])


def shorten(text: str) -> str:
    """The text in about LONGEST characters, with a note on how many were left out of the middle."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _weights(run: Run, source: object = None) -> dict[str, float]:
    """The weight of each reward of a source by its name in the log.

    That is the name of the function alone, or the full dotted path if an earlier reward has the same function name.
    """
    sources = (run.config.get("data") or {}).get("sources") or []
    own = next((each.get("rewards") for each in sources if each.get("name") == source), None)
    rewards: Sequence[dict[str, Any]] = own or run.config.get("rewards") or []
    whole = {reward["name"]: reward.get("weight", 1.0) for reward in rewards}
    short = {name.replace(":", ".").rpartition(".")[2]: weight for name, weight in reversed(whole.items())}
    return short | whole


def _sample(row: Row, weights: dict[str, float]) -> Sample:
    rewards = row.get("rewards") or {}
    total = sum(value * weights.get(name, 1.0) for name, value in rewards.items() if value is not None)
    texts = _text(row["prompt"]), _text(row["completion"])
    return Sample(row["step"], total, rewards, *texts, _turns(row.get("turns")), str(row.get("ended", "")))


def _turns(found: Any) -> tuple[Turn, ...]:
    """The turns of an episode; none if the line is damaged, or of a completion of one turn."""
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        return ()
    return tuple(Turn(str(one.get("role")), str(one.get("text", "")), _count(one.get("tokens"))) for one in found)


def _text(value: Any) -> str:
    """The text itself, or the contents of a conversation's messages."""
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", message)) for message in value)


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
