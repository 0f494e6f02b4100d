"""What a step's rollouts say in numbers: lengths, rewards of all that was sampled, and what the rewards logged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.rewards.grading import Graded
    from training.rollout.groups import GradedGroup


def length_metrics(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """Tokens that the policy wrote per completion, and the share of completions that hit the length limit."""
    samples = [sample for graded in groups for sample in graded.group.samples]
    tokens_B = torch.tensor([sample.written for sample in samples]).float()
    return {
        "completions/mean_tokens": tokens_B.mean().item(),
        "completions/min_tokens": tokens_B.min().item(),
        "completions/max_tokens": tokens_B.max().item(),
        "completions/truncated_share": torch.tensor([sample.truncated for sample in samples]).float().mean().item(),
    }


def sampled_metrics(groups: Sequence[GradedGroup], names: Sequence[str]) -> dict[str, float]:
    """Mean rewards of all that dynamic sampling sampled: the groups that it kept are a choice of undecided ones."""
    rewards_B_F = torch.cat([graded.rewards_G_F for graded in groups])
    means_F = rewards_B_F.nanmean(0) if rewards_B_F.isnan().any() else rewards_B_F.mean(0)
    total = torch.cat([graded.total_G for graded in groups]).mean().item()
    by_name = zip((f"sampled/{name}" for name in names), means_F.tolist(), strict=True)
    return {"sampled/reward": total, **dict(by_name)}


def logged_means(graded: Graded) -> dict[str, float]:
    """The mean of what the rewards logged in one rollout, by name."""
    return {name: sum(values) / len(values) for name, values in graded.logged.items()}


def logged_means_by_groups(rollouts: Sequence[Graded]) -> dict[str, float]:
    """The same over several rollouts, each of which weighs as many groups as it has; rounded to float32."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for graded in rollouts:
        for name, mean in logged_means(graded).items():
            found[name].append((mean, len(graded.groups)))
    weighted = {n: sum(m * groups for m, groups in means) / sum(g for _, g in means) for n, means in found.items()}
    return {name: torch.tensor(mean, dtype=torch.float32).item() for name, mean in weighted.items()}
