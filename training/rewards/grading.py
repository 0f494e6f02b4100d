"""Groups -> graded groups: the recipe's rewards of every completion, and what the rewards logged."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from training.loss.advantages import deviation
from training.rewards.rewards import Rewards
from training.rollout.dynamic_sampling import informative_groups
from training.rollout.groups import GradedGroup, Group, Sample

Logged = dict[str, list[float]]  # name -> values, as the rewards gave them to `log_metric`


@dataclass(frozen=True)
class Grader:
    """Grades groups by `rewards`; `decode` turns token ids into the text that a reward reads."""

    rewards: Rewards
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    mask_truncated: bool  # a truncated completion does not enter the loss

    def grade(self, groups: Sequence[Group], step: int) -> Graded:
        """Call each reward once, with all completions; at the same time if they wait for others. Raises RewardError."""
        if not groups:
            return Graded([])
        samples = [sample for group in groups for sample in group.samples]
        prompts = [group.prompt for group in groups for _ in group.samples]
        texts = self._texts(samples)
        columns = {
            "completions": texts,
            "completion_ids": [_written(sample) for sample in samples],
            "prompts": [prompt.text for prompt in prompts],
            "row": [prompt.row for prompt in prompts],
            "step": step,
            **_episode_columns(samples),
        }
        values_F, logged = _call(self.rewards.functions, columns)
        rewards_B_F = torch.tensor(values_F).T.contiguous()
        total_B = (rewards_B_F * torch.tensor(self.rewards.weights)).sum(-1)
        graded, first = [], 0
        in_loss = [not (self.mask_truncated and sample.truncated) for sample in samples]
        for group in groups:
            part = slice(first, first + len(group.samples))
            first = part.stop
            signal = informative_groups(total_B[None, part], torch.tensor([in_loss[part]]))[0]
            graded.append(GradedGroup(group, tuple(texts[part]), rewards_B_F[part], total_B[part], signal))
        return Graded(graded, logged)

    def _texts(self, samples: Sequence[Sample]) -> list[str]:
        """What rewards read: a completion's text, and of an episode what the policy wrote last."""
        texts = self.decode([sample.token_ids for sample in samples])
        pairs = zip(texts, samples, strict=True)
        return [text if sample.episode is None else sample.episode.answer for text, sample in pairs]


def _written(sample: Sample) -> Sequence[int]:
    """The tokens that the policy wrote."""
    if sample.episode is None:
        return sample.token_ids
    return [token for token, own in zip(sample.token_ids, sample.loss_mask, strict=True) if own]


def _episode_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The further columns of episodes; `turns` is the exchange as messages."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    return {
        "episode_reward": [episode.reward for episode in episodes],
        "turns": [[{"role": turn.role, "content": turn.text} for turn in episode.turns] for episode in episodes],
        "tool_calls": [episode.tool_calls for episode in episodes],
    }


def _call(functions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[list[list[float]], Logged]:
    """What each reward gives, and what they logged, in their order. Raises what the first one raised that failed.

    The threads are daemons: an interrupted run does not wait for a reward.
    """
    logs: list[Logged] = [defaultdict(list) for _ in functions]
    given: list[Future[list[float]]] = [Future() for _ in functions]

    def call(index: int) -> None:
        try:
            log = logs[index]
            given[index].set_result(functions[index](**columns, log_metric=lambda name, value: log[name].append(value)))
        except BaseException as error:
            given[index].set_exception(error)

    for index, function in enumerate(functions):
        if function.waits:
            threading.Thread(target=call, args=(index,), name="reward", daemon=True).start()
    for index, function in enumerate(functions):
        if not function.waits:
            call(index)
    values = [each.result() for each in given]
    merged: Logged = defaultdict(list)
    for log in logs:
        for name, logged in log.items():
            merged[name] += logged
    return values, dict(merged)


@dataclass(frozen=True)
class Graded:
    """The groups of one rollout, graded, and what the rewards logged while grading them."""

    groups: list[GradedGroup]
    logged: Logged = field(default_factory=dict)


def reward_metrics(groups: Sequence[GradedGroup], names: Sequence[str]) -> dict[str, float]:
    """Mean reward by function and in all, and the standard deviation of the latter, over all completions."""
    rewards_B_F = torch.cat([graded.rewards_G_F for graded in groups])
    total_B = torch.cat([graded.total_G for graded in groups])
    by_name = {f"rewards/{name}": rewards_B_F[:, i].mean().item() for i, name in enumerate(names)}
    return {**by_name, "reward": total_B.mean().item(), "reward_std": deviation(total_B[None]).item()}
