"""The values that a rollout is made of (a prompt, its completions, their rewards and advantages), and what it measured.

Axis suffixes: P prompts, G completions of one prompt, F reward functions, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from qerl.data.grading.grade import CORRECT_FROM

if TYPE_CHECKING:
    from qerl.data.tasks import Example
    from qerl.engine.interface import Completion
    from qerl.episodes.driven import Episode


# name -> for each call of a reward the mean of what it gave to `log_metric`, and its completions
Logged = dict[str, list[tuple[float, int]]]


@dataclass(frozen=True)
class Prompt:
    """One row of the data as the policy reads it; `row` is its index among the run's prompts, and `source` that of its
    source among the recipe's."""

    row: int
    ids: Sequence[int]
    text: str  # for rewards and logs alone: nothing is tokenized again
    example: Example
    messages: tuple[Mapping[str, Any], ...] = ()  # of which the ids were made; environments may add to them
    source: int = 0


@dataclass(frozen=True)
class Sample:
    """One completion, or one episode with an environment. The three sequences have one entry per token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # under the policy that sampled, noise included
    loss_mask: Sequence[bool]  # False for tokens that the policy did not write, such as a tool's output
    truncated: bool  # ended by the length limit
    episode: Episode | None = None
    drawn: tuple[tuple[int, int], ...] = ()  # (rollout, tokens) of each part, where completions are carried over
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)  # as `Completion.experts`

    @classmethod
    def of(cls, completion: Completion) -> Sample:
        """A completion of a single turn, all of whose tokens the policy wrote."""
        tokens = len(completion.token_ids)
        truncated = completion.finish_reason == "length"
        return cls(completion.token_ids, completion.logprobs, [True] * tokens, truncated, experts=completion.experts)

    @classmethod
    def of_episode(cls, episode: Episode) -> Sample:
        """All tokens of an episode after its prompt, of which the policy wrote some."""
        written, truncated = episode.written, episode.truncated
        return cls(episode.token_ids, episode.logprobs, written, truncated, episode, experts=episode.experts)

    @property
    def written(self) -> int:
        """How many of the tokens the policy wrote."""
        return sum(self.loss_mask)


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """The completions' tokens."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def prompt_of(self, sample: Sample) -> Sequence[int]:
        """The token ids that a sample continues: an environment may have added to the prompt."""
        return self.prompt.ids if sample.episode is None else sample.episode.prompt_ids


def grouped(prompts: Sequence[Prompt], samples: Sequence[Sample], size: int) -> list[Group]:
    """A group for each prompt, whose `size` samples stand together."""
    places = range(0, len(samples), size)
    return [Group(prompt, tuple(samples[at : at + size])) for prompt, at in zip(prompts, places, strict=True)]


@dataclass(frozen=True)
class GradedGroup:
    """A group with what its completions say and earn."""

    group: Group
    texts: tuple[str, ...]
    rewards_G_F: torch.Tensor  # float32 on the CPU; NaN for a reward that is of other sources, or does not apply
    total_G: torch.Tensor  # sum of weight * reward over those that apply; NaN if none does
    informative: bool  # its rewards differ, and at least one completion enters the loss
    extra: tuple[Mapping[str, Any], ...] = ()  # what the rewards logged of each completion


# Advantages are relative to the other completions of a prompt (GRPO, arXiv 2402.03300, section 4.1.2). They equal
# TRL 1.16's (GRPOTrainer, `sum_then_normalize`), with which the tests compare them, except for groups whose rewards are
# all equal. TRL subtracts a float32 mean: eight rewards of 0.7 leave advantages of 6e-4, all of the same sign, and Adam
# turns even such a small gradient into a full step. Here such groups have the advantage 0. TRL's own count of groups
# without variance misses them too, and counts the whole batch as one group if `advantage_scale` is batch.


def group_advantages(total_P_G: torch.Tensor, scale: str) -> tuple[torch.Tensor, float]:
    """(reward - mean of its group) / (standard deviation + 1e-4), of float32 rewards (P, G); the share of equal groups.

    `scale` chooses the unbiased standard deviation: of the "group", of the "batch", or "none" for no
    division. A completion whose reward is NaN counts in neither. It has the advantage 0, as all of an equal group.
    """
    advantages_P_G = total_P_G - _means(total_P_G)
    if scale == "group":
        advantages_P_G = advantages_P_G / (deviation(total_P_G) + 1e-4)
    elif scale == "batch":
        advantages_P_G = advantages_P_G / (deviation(total_P_G.reshape(1, -1)) + 1e-4)
    equal_P = ~rewards_differ(total_P_G)
    none_P_G = equal_P[:, None] | total_P_G.isnan()
    return advantages_P_G.masked_fill(none_P_G, 0.0), equal_P.float().mean().item()


def rewards_differ(rewards: torch.Tensor) -> torch.Tensor:
    """Whether the rewards (P, G) of each group differ: bool (P,). Differences under 1e-6 are float32 rounding."""
    spread = rewards.nan_to_num(-torch.inf).amax(1) - rewards.nan_to_num(torch.inf).amin(1)
    return spread > 1e-6 * rewards.nan_to_num(0.0).abs().amax(1).clamp(min=1.0)


def informative_groups(rewards: torch.Tensor, in_loss: torch.Tensor) -> list[bool]:
    """Which groups have a gradient: rewards that differ, and a completion in the loss. Both are (P, G)."""
    return (rewards_differ(rewards) & in_loss.any(1)).tolist()


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """The unbiased standard deviations (R, 1) of the rows (R, N), with TRL's order of operations."""
    count = (~rewards.isnan()).sum(1, keepdim=True)
    variance = _means((rewards - _means(rewards)) ** 2)
    return torch.sqrt(variance * (count / (count - 1)))


def _means(rewards: torch.Tensor) -> torch.Tensor:
    """The means (R, 1) of the rows (R, N), without NaN."""
    return rewards.nanmean(1, keepdim=True) if rewards.isnan().any() else rewards.mean(1, keepdim=True)


def mean_of_known(values: torch.Tensor) -> float:
    """The mean of the values that are not NaN."""
    known = ~values.isnan()
    return values.mean().item() if known.all() else values[known].mean().item()


def length_metrics(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """Tokens that the policy wrote per completion, and the share of completions that hit the length limit."""
    samples = [sample for graded in groups for sample in graded.group.samples]
    tokens_B = torch.tensor([sample.written for sample in samples]).float()
    truncated_B = torch.tensor([sample.truncated for sample in samples])
    ended = {} if truncated_B.all() else {"completions/mean_ended_tokens": tokens_B[~truncated_B].mean().item()}
    return {
        "completions/mean_tokens": tokens_B.mean().item(),
        **ended,
        "completions/min_tokens": tokens_B.min().item(),
        "completions/max_tokens": tokens_B.max().item(),
        "completions/truncated_share": truncated_B.float().mean().item(),
    }


def group_metrics(groups: Sequence[GradedGroup], names: Sequence[str]) -> dict[str, float]:
    """How far the rewards of a group are apart, and the shares of groups that are all right or all wrong.

    What is right is decided by the reward called accuracy; without it nobody knows. `names` are the rewards'.
    """
    found = {"groups/reward_std": mean_of_known(deviation(torch.stack([graded.total_G for graded in groups])))}
    if "accuracy" not in names:
        return found
    grades = [graded.rewards_G_F[:, names.index("accuracy")] for graded in groups]
    right = [grades_G >= CORRECT_FROM for grades_G in grades if not grades_G.isnan().any()]  # NaN: of another source
    if right:
        right_P_G = torch.stack(right)
        found["groups/all_right_share"] = right_P_G.all(1).float().mean().item()
        found["groups/all_wrong_share"] = (~right_P_G.any(1)).float().mean().item()
    return found


def sampled_metrics(groups: Sequence[GradedGroup], names: Sequence[str]) -> dict[str, float]:
    """Mean rewards of all that dynamic sampling sampled: the groups that it kept are a choice of undecided ones."""
    rewards_B_F = torch.cat([graded.rewards_G_F for graded in groups])
    means_F = rewards_B_F.nanmean(0) if rewards_B_F.isnan().any() else rewards_B_F.mean(0)
    total = mean_of_known(torch.cat([graded.total_G for graded in groups]))
    by_name = zip((f"sampled/{name}" for name in names), means_F.tolist(), strict=True)
    return {"sampled/reward": total, **dict(by_name)}


def logged_means(logged: Logged) -> dict[str, float]:
    """The mean of what the rewards logged, by name: each call of a reward weighs as many completions as it graded."""
    of_all = {name: sum(completions for _, completions in calls) for name, calls in logged.items()}
    return {name: sum(mean * (n / of_all[name]) for mean, n in calls) for name, calls in logged.items()}
