"""Which groups have rewards that differ; the others have advantage 0.

TRL 1.16 subtracts a float32 mean: eight rewards of 0.7 leave advantages of 6e-4, all of one sign, and Adam makes a
whole step of however small a gradient. Its own count of groups without variance misses them, and is one of the batch
where `advantage_scale` is batch.
"""

from __future__ import annotations

import torch


def rewards_differ(rewards: torch.Tensor) -> torch.Tensor:
    """(P,) bool of rewards (P, G). Differences under one millionth are rounding: rewards are float32."""
    spread = rewards.amax(1) - rewards.amin(1)
    return spread > 1e-6 * rewards.abs().amax(1).clamp(min=1.0)


def clear_equal_groups_(advantages: torch.Tensor, rewards: torch.Tensor) -> float:
    """Set the advantages (P * G,) of groups with equal `rewards` (P, G) to 0; returns the share of such groups."""
    equal = ~rewards_differ(rewards)
    advantages.view(rewards.shape)[equal] = 0.0
    return equal.float().mean().item()
