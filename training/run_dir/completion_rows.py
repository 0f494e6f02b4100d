"""What is kept of a step's completions for people to read: rows of completions/, and which of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from training.rewards.rewards import Rewards
    from training.rollout.groups import GradedGroup, Sample


def completion_rows(
    groups: Sequence[GradedGroup], advantages_P_G: torch.Tensor, rewards: Rewards
) -> list[dict[str, Any]]:
    """A rollout as rows for people to read: prompt, completion, its length and whether that is the limit, advantage,
    rewards by name, and which of several sources it is of."""
    names, sources = rewards.names, rewards.source_names
    return [
        {
            "prompt": graded.group.prompt.text,
            "completion": text,
            "tokens": sample.written,
            "truncated": sample.truncated,
            "advantage": advantage,
            "rewards": {name: own for name, own in zip(names, rewards_F, strict=True) if not math.isnan(own)},
            **({"source": sources[graded.group.prompt.source]} if any(sources) else {}),
            **_episode_row(sample),
        }
        for graded, advantages in zip(groups, advantages_P_G.tolist(), strict=True)
        for sample, text, advantage, rewards_F in zip(
            graded.group.samples, graded.texts, advantages, graded.rewards_G_F.tolist(), strict=True
        )
    ]


def _episode_row(sample: Sample) -> dict[str, Any]:
    """What a row says of an episode besides: its turns, and how it ended."""
    episode = sample.episode
    if episode is None:
        return {}
    turns = [{"role": turn.role, "text": turn.text, "tokens": turn.tokens} for turn in episode.turns]
    return {"turns": turns, "ended": episode.error or episode.ended}


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the rows at equal distances, so that a sample of a rollout has different prompts."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]
