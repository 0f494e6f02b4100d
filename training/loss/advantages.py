"""Give groups whose rewards are all equal the advantage 0, and count them.

TRL 1.16 subtracts a float32 mean: eight rewards of 0.7 leave advantages of 6e-4, all of the same sign, and Adam turns
even such a small gradient into a full step. TRL's own count of groups without variance misses these groups, and with
`advantage_scale: batch` it looks at the batch instead of the groups.
"""

from __future__ import annotations

import torch


def rewards_differ(rewards: torch.Tensor) -> torch.Tensor:
    """Whether the rewards (P, G) of each group differ: bool (P,). Differences under 1e-6 are float32 rounding."""
    spread = rewards.amax(1) - rewards.amin(1)
    return spread > 1e-6 * rewards.abs().amax(1).clamp(min=1.0)


def clear_equal_groups_(advantages: torch.Tensor, rewards: torch.Tensor) -> float:
    """Set the advantages (P * G,) of groups with equal `rewards` (P, G) to 0. Returns the share of such groups."""
    equal = ~rewards_differ(rewards)
    advantages.view(rewards.shape)[equal] = 0.0
    return equal.float().mean().item()
