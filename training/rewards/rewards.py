"""The rewards of a recipe: find them by name or path, call them with the columns they ask for, check what they return.

A reward is a function that takes columns and returns one finite number per completion, for example

    def short(completions, **columns):  # named as rewards.py:short in the recipe
        return [float(len(text) < 500) for text in completions]

It is called with the columns that training/rewards/functions.py lists, as keyword arguments; a function that does not
end in `**columns` gets only the columns it names. It runs in a process of its own (qerl/base/own/function.py), within
`timeout_s`, and may be async. A reward that raises, is late, ends its process, or returns None, NaN or the wrong number
of values, stops the run, and the completion it failed on is saved as failed_reward.json in the run directory. If the
name is a URL, the reward is a reward server (training/rewards/server.py).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from qerl.api.arguments import PYTHON, given_function
from qerl.base.errors import ConfigError
from qerl.base.own.function import COLUMNS, Named, check_columns, own_function
from qerl.config.rewards import OWN, is_url
from qerl.data.examples import check_answers
from qerl.data.grading.grade import check_grader
from qerl.data.rows import sources_of
from qerl.data.tasks import Example, task_of
from training.rewards import functions as reward_functions
from training.rewards.guarded import GRADED, GuardedReward, Reward, Rows, episode_columns
from training.rewards.judge import Judge
from training.rewards.server import RewardServer

if TYPE_CHECKING:
    from qerl.config.schema import RewardConfig, RunConfig
    from qerl.data.tasks import Task
    from training.rollout.groups import Prompt

REWARDS: dict[str, Reward] = {
    "accuracy": reward_functions.accuracy,
    "format": reward_functions.format,
    "soft_overlong": reward_functions.soft_overlong,
    "length": reward_functions.length,
    "judge": Judge(),
    "environment": reward_functions.environment,
}

TRIED = 2  # rows that a reward server has to grade before training starts


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run. Each function has the name of its metric; one of another source may have the same."""

    functions: list[Reward]
    weights: list[float]
    sources: tuple[int, ...] = ()  # of each function, whose rewards it gives; empty: there is one source
    source_names: tuple[str, ...] = ("",)

    @property
    def names(self) -> list[str]:
        """The metrics, each once."""
        return list(dict.fromkeys(function.__name__ for function in self.functions))

    def of_source(self, source: int) -> list[int]:
        """The indices of a source's functions."""
        return [index for index in range(len(self.functions)) if not self.sources or self.sources[index] == source]


def fixed_columns(task: Task, max_new_tokens: int) -> dict[str, Any]:
    """The arguments of a reward that are the same for every completion of a run."""
    return {"task": task, "max_new_tokens": max_new_tokens}


def build_rewards(
    wanted: Sequence[RewardConfig],
    fixed: Mapping[str, Any],
    examples: Sequence[Example],
    run_dir: Path,
    episodes: Sequence[str] = (),
) -> Rewards:
    """The rewards that a recipe wants; `fixed` comes from `fixed_columns`.

    `episodes` are the further columns of a run with an environment.

    Raises ConfigError for an unknown reward, or for arguments that it does not take.
    """
    return build_all_rewards([RewardsOf("", wanted, fixed, examples)], run_dir, episodes)


@dataclass(frozen=True)
class RewardsOf:
    """What the rewards of one source are made of: the arguments of `build_rewards`."""

    name: str
    wanted: Sequence[RewardConfig]
    fixed: Mapping[str, Any]
    examples: Sequence[Example]


def build_all_rewards(sources: Sequence[RewardsOf], run_dir: Path, episodes: Sequence[str] = ()) -> Rewards:
    """The rewards of all sources, whose examples are the run's rows, one source after another."""
    names = _metric_names([reward.name for source in sources for reward in source.wanted])
    functions, weights, places, first = [], [], [], 0
    for place, source in enumerate(sources):
        check_grader(source.fixed["task"], source.examples)
        if any(reward.name in GRADED for reward in source.wanted):
            check_answers(source.fixed["task"], source.examples)
        for reward, function in zip(source.wanted, check_rewards(source.wanted, source.fixed), strict=True):
            of_function = episode_columns(function)
            further = [name for name in episodes if name in of_function]
            parameters = inspect.signature(function).parameters
            check_columns(f"reward {reward.name}", parameters, reward.args, source.examples, further)
            rows = Rows(source.examples, first)
            guarded = GuardedReward(names[reward.name], reward, function, source.fixed, rows, run_dir)
            if is_url(reward.name) or isinstance(function, Judge):
                _try_server(guarded, rows)
            functions.append(guarded)
            weights.append(float(reward.weight))
            places.append(place)
        first += len(source.examples)
    return Rewards(functions, weights, tuple(places), tuple(source.name for source in sources))


def rewards_of_run(
    config: RunConfig, prompts: Sequence[Prompt], run_dir: Path, episodes: Sequence[str] = ()
) -> Rewards:
    """The rewards of a recipe over a run's prompts."""
    given = []
    for index, source in enumerate(sources_of(config)):
        fixed = fixed_columns(task_of(source.data), config.rollout.max_new_tokens)
        examples = [prompt.example for prompt in prompts if prompt.source == index]
        given.append(RewardsOf(source.name, source.rewards, fixed, examples))
    return build_all_rewards(given, run_dir, episodes)


def check_rewards(wanted: Sequence[RewardConfig], fixed: Mapping[str, Any]) -> list[Reward]:
    """Find a recipe's rewards and check their arguments; needs no heavy import. Raises ConfigError."""
    functions = []
    for reward in wanted:
        function = find_reward(reward.name, reward.timeout_s)
        _check_arguments(reward, function)
        if reward.name in REWARDS:
            _try_arguments(reward, function, fixed)
        elif is_url(reward.name):
            function.check_args(reward.args)
        functions.append(function)
    return functions


def find_reward(name: str, timeout_s: float | None = None) -> Reward:
    """The reward that a name, URL, `file.py:function`, `package.module:function` or `package.module.function` means."""
    if name in REWARDS:
        return REWARDS[name]
    if name == "code":
        return reward_functions.code()
    if is_url(name):
        return RewardServer(name)
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no reward {name!r}{hint} (rewards: {', '.join(REWARDS)}; {OWN})")
    if place == PYTHON:
        return given_function("reward", attribute)
    others = f"one of {', '.join(REWARDS)}"
    return own_function(place, attribute, Named("reward", name, others), timeout_s)


def _check_arguments(reward: RewardConfig, function: Reward) -> None:
    """Raise ConfigError if the recipe gives an argument that the function does not take."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = reward.name not in REWARDS and not is_url(reward.name)
    takes_all = own and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = [name for name in named if name not in (*COLUMNS, *episode_columns(function), "log_metric")]
    for key in reward.args:
        if key in COLUMNS or (key not in options and not takes_all):
            near = difflib.get_close_matches(key, options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"reward {reward.name} takes no argument {key!r}{hint} (its arguments: {', '.join(options) or 'none'})"
            )


def _try_arguments(reward: RewardConfig, function: Reward, fixed: Mapping[str, Any]) -> None:
    """Call one of our own rewards on an empty batch, so that wrong arguments show before the first rollout."""
    try:
        function(**dict.fromkeys(COLUMNS, ()) | fixed | dict(reward.args))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {reward.name} cannot be called with args {dict(reward.args)}: {error}") from error


def _try_server(reward: GuardedReward, rows: Rows) -> None:
    """Ask a server about the first rows, with their answers as completions, to see that it answers as it has to."""
    examples = rows.examples[:TRIED]
    texts = [example.answer for example in examples]
    numbers = list(range(rows.first, rows.first + len(examples)))
    reward(texts, numbers, prompts=[example.question for example in examples], completion_ids=[[0] for _ in texts])


def _metric_names(rewards: Sequence[str]) -> dict[str, str]:
    """The metric of each reward. Ours have their own names; of others see `_metric_name`."""
    found = {name: name for name in rewards if name in REWARDS}
    for name in rewards:
        if name not in found:
            found[name] = _metric_name(name, found.values())
    return found


def _metric_name(name: str, taken: Collection[str]) -> str:
    """The function's name, or of a URL the end of its path, else its host; the whole name if that is `taken`."""
    if is_url(name):
        url = urlsplit(name)
        short = url.path.strip("/").rpartition("/")[2] or url.hostname
        whole = f"{url.netloc}{url.path}".replace("/", "_")
    else:
        short, whole = name.replace(":", ".").rpartition(".")[2], name
    return whole if short in taken else short
