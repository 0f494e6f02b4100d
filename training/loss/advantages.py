"""Rewards -> advantages, relative to the other completions of the same prompt (GRPO, arXiv 2402.03300, section 4.1.2).

The values equal TRL 1.16's (GRPOTrainer, `sum_then_normalize`), with which the tests compare them, except for
groups whose rewards are all equal. TRL subtracts a float32 mean: eight rewards of 0.7 leave advantages of 6e-4, all of
the same sign, and Adam turns even such a small gradient into a full step. Here such groups have the advantage 0. TRL's
own count of groups without variance misses them too, and counts the whole batch as one group if `advantage_scale` is
batch.
"""

from __future__ import annotations

import torch


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
