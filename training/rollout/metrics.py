"""What a step's rollouts say in numbers: lengths, groups, rewards of all that was sampled, what the rewards logged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qerl.data.grading.grade import CORRECT_FROM
from training.loss.advantages import deviation

if TYPE_CHECKING:
    from training.rewards.grading import Logged
    from training.rollout.groups import GradedGroup


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

    What is right is decided by the reward called accuracy; without it nobody knows. `names` are those of the rewards.
    """
    found = {"groups/reward_std": deviation(torch.stack([graded.total_G for graded in groups])).mean().item()}
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
    total = torch.cat([graded.total_G for graded in groups]).mean().item()
    by_name = zip((f"sampled/{name}" for name in names), means_F.tolist(), strict=True)
    return {"sampled/reward": total, **dict(by_name)}


def logged_means(logged: Logged) -> dict[str, float]:
    """The mean of what the rewards logged, by name: each call of a reward weighs as many completions as it graded."""
    of_all = {name: sum(completions for _, completions in calls) for name, calls in logged.items()}
    return {name: sum(mean * (n / of_all[name]) for mean, n in calls) for name, calls in logged.items()}
