"""The values that a rollout is made of: a prompt, the completions sampled for it, and their rewards.

Axis suffixes: P prompts, G completions of one prompt, F reward functions, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qerl.data.tasks import Example
    from qerl.engine.interface import Completion
    from qerl.episodes.driven import Episode


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
    rewards_G_F: torch.Tensor  # float32 on the CPU; NaN for a reward that is of other sources
    total_G: torch.Tensor  # sum over the source's own functions of weight * reward
    informative: bool  # its rewards differ, and at least one completion enters the loss
