"""Warnings about a run that goes wrong, in words and derived from the metrics of its steps alone.

Each check looks at the last WINDOW values of a metric, so that a single odd step raises no warning. A warning is
repeated after COOL_DOWN steps at the earliest. The bounds mark where a run is no longer worth its time; a good run is
far from them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]

WINDOW = 5  # steps
COOL_DOWN = 50  # steps
TRUNCATED = 0.5  # share of the completions
UNANSWERED = 0.5  # share of the completions
UNSCORED = 0.5  # share of the completions
COLLAPSED = 0.1  # share of the entropy of the first steps
SOLVED = 0.8  # from this accuracy on completions may be alike, since there is little left to explore
MISMATCH_GROWTH = 5.0  # times the mismatch of the first steps with as much noise
MISMATCH_LEAST = 1e-3  # nats; the mismatch that comes from kernels alone is smaller
OUTSIDE = 0.1  # share of the tokens
FAILED = 0.2  # share of the episodes
INFORMATIVE = 0.1  # share of the sampled groups

# The metrics that say whether completions are right, best first: the accuracy if there is such a reward, and of all
# sampled completions if those are more than the batch.
GRADES = ("sampled/accuracy", "rewards/accuracy", "sampled/reward", "reward")


@dataclass(frozen=True)
class Finding:
    """A warning. Its `kind` is for the cool-down; its `text` gives the figures and says what to change."""

    kind: str
    text: str


def findings(rows: Rows) -> list[Finding]:
    """The warnings for the last of `rows`, the metrics of all steps so far, oldest first.

    A run that is taught is not judged by its rewards, which it logs at most, nor by an entropy that others decide.
    """
    taught = bool(rows) and any(name in rows[-1] for name in TAUGHT)
    zero = None if taught else _reward_zero(rows)
    found = [] if zero is None else [Finding("reward_zero", zero)]
    for kind, check in CHECKS.items():
        explained = zero is not None and kind in EXPLAINED_BY_ZERO
        if not explained and not (taught and kind in OF_REWARDS) and (text := check(rows)) is not None:
            found.append(Finding(kind, text))
    return found


def due(found: Iterable[Finding], told: Mapping[str, int], step: int) -> list[Finding]:
    """The findings to tell now; `told` maps each kind to the step at which it was told last."""
    return [finding for finding in found if finding.kind not in told or step - told[finding.kind] >= COOL_DOWN]


def _reward_zero(rows: Rows) -> str | None:
    for key in GRADES:
        if (values := _recent(rows, key)) is not None:
            what = f"the {key.rpartition('/')[2]} has been 0 for {len(values)} steps in a row"
            return None if any(values) else f"{what}: {_why_zero(rows)}"
    return None


def _why_zero(rows: Rows) -> str:
    """The most likely cause if all rewards are 0. Truncation comes first, since it causes missing answers too."""
    truncated = _mean(rows, "completions/truncated_share") or 0.0
    if truncated >= TRUNCATED:
        return f"{truncated:.0%} of the completions hit the length limit; raise rollout.max_new_tokens"
    no_answer = _mean(rows, "grades/no_answer_share") or 0.0
    if no_answer >= UNANSWERED:
        return (
            f"in {no_answer:.0%} of the completions no answer was found; read completions/, and make the prompt "
            "(data.prompt_template, data.system_prompt) ask for the form that the task grades"
        )
    refused = _mean(rows, "grades/refused_share") or 0.0
    if refused >= UNANSWERED:
        return f"{refused:.0%} of the answers could not be compared; check the answers of the data and data.columns"
    if _mean(rows, "rewards/format") == 0.0:
        return "no completion has the form that the reward format asks for; check its style against the prompt"
    return (
        "completions end and state answers that are wrong; take easier data or a stronger base, a larger "
        "rollout.group_size, or check the reference answers with `qerl grade`"
    )


def _no_variance(rows: Rows) -> str | None:
    shares = _recent(rows, "groups/zero_variance_share")
    if shares is None or min(shares) < 1.0:
        return None
    unscored = _mean(rows, "completions/unscored_share") or 0.0
    if unscored >= UNSCORED:
        return (
            f"in {len(shares)} steps the gradient is 0, and {unscored:.0%} of the completions have no reward: every "
            "reward function returned None for them; return a number for what can be judged"
        )
    reward = _mean(rows, "reward")
    height = "" if reward is None else f" (mean reward {reward:.2f})"
    right = _mean(rows, "groups/all_right_share")
    data = "easier or harder data" if right is None else "harder data" if right > 0.5 else "easier data"
    return (
        f"in {len(shares)} steps no group had completions of different reward{height}, so that the gradient is 0: take "
        f"{data}, a larger rollout.group_size or rollout.temperature, or rollout.dynamic_sampling.enabled: true"
    )


def _truncated(rows: Rows) -> str | None:
    share = _mean(rows, "completions/truncated_share")
    if share is None or share < TRUNCATED:
        return None
    return (
        f"{share:.0%} of the completions hit the length limit: raise rollout.max_new_tokens, or add the reward "
        "soft_overlong"
    )


def _entropy(rows: Rows) -> str | None:
    first, now = _mean(rows[:WINDOW], "entropy"), _mean(rows, "entropy")
    if first is None or now is None or now >= COLLAPSED * first:
        return None
    if any((_mean(rows, key) or 0.0) >= SOLVED for key in ("sampled/accuracy", "rewards/accuracy")):
        return None
    return (
        f"the entropy fell from {first:.3g} to {now:.3g} nats per token, so that completions hardly differ any more: "
        "lower optim.learning_rate, raise loss.entropy_coef or noise.sigma_end, or stop at the best checkpoint"
    )


def _mismatch(rows: Rows) -> str | None:
    now = _mean(rows, "mismatch_kl")
    if now is None or now < MISMATCH_LEAST:
        return None
    sigma = max(_recent(rows, "noise/sigma") or [0.0])
    older = _age(rows[-1]) / 2  # policies that are twice as old differ more
    alike = [row for row in rows if (row.get("noise/sigma") or 0.0) >= sigma and _age(row) >= older]
    first = _mean(alike[:WINDOW], "mismatch_kl")
    if first is None or now < MISMATCH_GROWTH * first:
        return None
    return (
        f"mismatch_kl grew from {first:.1e} to {now:.1e} nats at no more noise: engine and trainer drift apart; lower "
        "optim.learning_rate, or resume from an earlier checkpoint if the reward falls too"
    )


def _age(row: Mapping[str, Any]) -> float:
    """How many steps before its own, on average, the tokens of a step were drawn."""
    return row.get("carry_over/mean_age") or 0.0


def _outside(rows: Rows) -> str | None:
    for fate in ("capped", "masked"):
        share = _mean(rows, f"correction/{fate}_share")
        if share is not None and share >= OUTSIDE:
            return (
                f"{share:.0%} of the tokens have an importance ratio outside loss.correction's bounds and were {fate}: "
                "sampler and trainer differ much; lower noise.sigma_start, or raise loss.correction.cap"
            )
    return None


def _informative(rows: Rows) -> str | None:
    share = _mean(rows, "dynamic_sampling/informative_share")
    if share is None or share >= INFORMATIVE:
        return None
    return (
        f"dynamic sampling finds a signal in only {share:.1%} of the groups that it samples, and most of the rollouts "
        "are thrown away: take data that the model solves sometimes, or a larger rollout.group_size"
    )


def _environment(rows: Rows) -> str | None:
    share = _mean(rows, "environment/failed_share")
    if share is None or share < FAILED:
        return None
    return (
        f"{share:.0%} of the episodes were ended by an error or a timeout of their environment: the log says what the "
        "first one did; correct the environment, or raise environment.timeout_s"
    )


CHECKS: dict[str, Callable[[Rows], str | None]] = {
    "no_variance": _no_variance,
    "truncated": _truncated,
    "environment_fails": _environment,
    "entropy_collapse": _entropy,
    "mismatch_growing": _mismatch,
    "outside_bounds": _outside,
    "few_informative": _informative,
}
EXPLAINED_BY_ZERO = ("no_variance", "truncated", "few_informative")
OF_REWARDS = ("no_variance", "truncated", "entropy_collapse", "few_informative")
TAUGHT = ("kl_to_teacher/forward", "nll")  # by a teacher, or by given conversations


def _recent(rows: Rows, key: str) -> list[float] | None:
    """The last WINDOW values of a metric; None if there are fewer, or if the last one is older than the window is long.

    A step may lack a metric: further updates on the same rollout have none of the rollout's metrics.
    """
    places = [place for place, row in enumerate(rows) if row.get(key) is not None][-WINDOW:]
    if len(places) < WINDOW or len(rows) - 1 - places[-1] >= places[-1] - places[0]:
        return None
    return [rows[place][key] for place in places]


def _mean(rows: Rows, key: str) -> float | None:
    values = _recent(rows, key)
    return None if values is None else sum(values) / len(values)
