"""Groups -> graded groups: the recipe's rewards of every completion, and what the rewards logged."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl.base.own_function import ENVIRONMENTS
from training.loss.groups import (
    GradedGroup,
    Group,
    Logged,
    Prompt,
    Sample,
    deviation,
    informative_groups,
    mean_of_known,
)
from training.rewards.rewards import Reward, Rewards

Extra = dict[str, Sequence[Any]]  # what a call of a reward gave to `log_extra`: column -> a value per completion


@dataclass(frozen=True)
class Grader:
    """Grades groups by `rewards`; `decode` turns token ids into the text that a reward reads."""

    rewards: Rewards
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    mask_truncated: bool  # a truncated completion does not enter the loss

    def grade(self, groups: Sequence[Group], step: int, steps_done: int) -> Graded:
        """Call each reward once, with all completions of its source; at the same time if they wait for others.

        `step` is counted as in metrics.jsonl, from 1. Raises RewardError.
        """
        if not groups:
            return Graded([])
        samples = [sample for group in groups for sample in group.samples]
        texts = self._texts(samples)
        when = {"step": step, "steps_done": steps_done}
        rewards_B_F, total_B, extra_B, logged = self._graded(groups, samples, texts, when)
        graded, first = [], 0
        in_loss = [not (self.mask_truncated and sample.truncated) for sample in samples]
        for group in groups:
            part = slice(first, first + len(group.samples))
            first = part.stop
            signal = informative_groups(total_B[None, part], torch.tensor([in_loss[part]]))[0]
            own = tuple(texts[part]), rewards_B_F[part], total_B[part], signal, tuple(extra_B[part])
            graded.append(GradedGroup(group, *own))
        return Graded(graded, logged)

    def _graded(
        self, groups: Sequence[Group], samples: Sequence[Sample], texts: Sequence[str], when: Mapping[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, Any]], Logged]:
        """Rewards (B, F) with NaN for those that do not apply, totals (B,), and what was logged: of each, and metrics.

        A total is NaN if none of its rewards applies.
        """
        prompts = [group.prompt for group in groups for _ in group.samples]
        sources = sorted({prompt.source for prompt in prompts})
        rows_of = {source: [row for row, one in enumerate(prompts) if one.source == source] for source in sources}
        functions, names = self.rewards.functions, self.rewards.names
        asked: list[tuple[int, Mapping[str, Any]]] = []  # the place of a function, and what it is called with
        for source, rows in rows_of.items():
            columns = {**_columns(rows, samples, prompts, texts), **when}
            asked += [(index, columns) for index in self.rewards.of_source(source)]
        given, extra, logged = _call([(functions[index], columns) for index, columns in asked])
        values = {index: torch.tensor(each) for (index, _), each in zip(asked, given, strict=True)}
        rewards_B_F, total_B = torch.full((len(samples), len(names)), math.nan), torch.zeros(len(samples))
        for source, rows in rows_of.items():
            own = self.rewards.of_source(source)
            own_b_f = torch.stack([values[index] for index in own], 1)
            places = [names.index(functions[index].__name__) for index in own]
            rewards_B_F[torch.tensor(rows)[:, None], torch.tensor(places)] = own_b_f
            weighted_b_f = own_b_f * torch.tensor([self.rewards.weights[index] for index in own])
            total_B[rows] = weighted_b_f.nansum(-1).masked_fill(own_b_f.isnan().all(-1), math.nan)
        extra_B: list[dict[str, Any]] = [{} for _ in samples]
        for (index, _), of_call in zip(asked, extra, strict=True):
            for column, values in of_call.items():
                for row, value in zip(rows_of[self.rewards.source_of(index)], values, strict=True):
                    name = f"{functions[index].__name__}/{column}" if column in extra_B[row] else column
                    extra_B[row][name] = value
        return rewards_B_F, total_B, extra_B, logged

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


def columns_of_episodes(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The further columns of episodes; `turns` is the exchange as messages."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    return {
        "episode_reward": [episode.reward for episode in episodes],
        "turns": [[{"role": turn.role, "content": turn.text} for turn in episode.turns] for episode in episodes],
        "tool_calls": [episode.tool_calls for episode in episodes],
        ENVIRONMENTS: [episode.environment for episode in episodes],
    }


def _columns(
    rows: Sequence[int], samples: Sequence[Sample], prompts: Sequence[Prompt], texts: Sequence[str]
) -> dict[str, Any]:
    """What the rewards of one source are called with; `rows` are its places among all."""
    own = [samples[row] for row in rows]
    return {
        "completions": [texts[row] for row in rows],
        "completion_ids": [_written(sample) for sample in own],
        "prompts": [prompts[row].text for row in rows],
        "row": [prompts[row].row for row in rows],
        **columns_of_episodes(own),
    }


def _call(asked: Sequence[tuple[Reward, Mapping[str, Any]]]) -> tuple[list[list[float]], list[Extra], Logged]:
    """What each reward gives, and what they logged, in their order. Raises what the first one raised that failed.

    The threads are daemons: an interrupted run does not wait for a reward.
    """
    logs: list[dict[str, list[float]]] = [defaultdict(list) for _ in asked]
    extra: list[Extra] = [{} for _ in asked]
    given: list[Future[list[float]]] = [Future() for _ in asked]

    def call(index: int) -> None:
        try:
            log, (function, columns) = logs[index], asked[index]
            own = {"log_metric": lambda name, value: log[name].append(value), "log_extra": extra[index].__setitem__}
            given[index].set_result(function(**columns, **own))
        except BaseException as error:
            given[index].set_exception(error)

    for index, (function, _) in enumerate(asked):
        if function.waits:
            threading.Thread(target=call, args=(index,), name="reward", daemon=True).start()
    for index, (function, _) in enumerate(asked):
        if not function.waits:
            call(index)
    values = [each.result() for each in given]
    merged: Logged = defaultdict(list)
    for log, (_, columns) in zip(logs, asked, strict=True):
        for name, logged in log.items():
            merged[name].append((sum(logged) / len(logged), len(columns["completions"])))
    return values, extra, dict(merged)


@dataclass(frozen=True)
class Graded:
    """The groups of one rollout, graded, and what the rewards logged while grading them."""

    groups: list[GradedGroup]
    logged: Logged = field(default_factory=dict)


def reward_metrics(groups: Sequence[GradedGroup], names: Sequence[str]) -> dict[str, float]:
    """Mean reward by function and in all, and the standard deviation of the latter, over all completions that have it.

    NaN if there are none. `completions/unscored_share` is there if some completions have no reward at all.
    """
    rewards_B_F = torch.cat([graded.rewards_G_F for graded in groups])
    total_B = torch.cat([graded.total_G for graded in groups])
    found = {f"rewards/{name}": mean_of_known(rewards_B_F[:, i]) for i, name in enumerate(names)}
    if (unscored := total_B.isnan()).any():
        found["completions/unscored_share"] = unscored.float().mean().item()
    return {**found, "reward": mean_of_known(total_B), "reward_std": deviation(total_B[None]).item()}


def source_metrics(groups: Sequence[GradedGroup], rewards: Rewards) -> dict[str, float]:
    """The rewards of each source, its share of the prompts and its completions' tokens; empty without sources.

    A source without a prompt in this step has a share of 0 and nothing else.
    """
    if not any(rewards.source_names):
        return {}
    found: dict[str, float] = {}
    for source, name in enumerate(rewards.source_names):
        own = [graded for graded in groups if graded.group.prompt.source == source]
        found[f"sources/{name}/share"] = len(own) / len(groups)
        if own:
            means = reward_metrics(own, rewards.names)
            kept = {key: value for key, value in means.items() if key != "reward_std" and not math.isnan(value)}
            written = [sample.written for graded in own for sample in graded.group.samples]
            kept["mean_tokens"] = sum(written) / len(written)
            found |= {f"sources/{name}/{key}": value for key, value in kept.items()}
    return found


def merged_grades(parts: Sequence[Graded]) -> Graded:
    """The graded groups of all parts (ranks, or rollouts of a step), and what the rewards logged in each, in order."""
    logged: Logged = {}
    for part in parts:
        for name, values in part.logged.items():
            logged.setdefault(name, []).extend(values)
    return Graded([group for part in parts for group in part.groups], logged)
