"""The rules of `qerl/config/rules.py` about several sources of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.config.conflict import Conflict, Conflicts
from qerl.config.rules_rewards import check_rewards
from qerl.config.rules_tasks import columns_of, known_task, template_of

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def sources(config: RunConfig) -> Conflicts:
    """Each source has a name of its own and what one source could have, and nothing says two things of its rows."""
    data = config.data
    if not data.sources:
        return
    for key in ("source", "limit"):
        if (value := getattr(data, key)) is not None:
            yield Conflict(
                {f"data.{key}": value, "data.sources": [each.name for each in data.sources]},
                "each of several sources has its own",
                f"data.sources.0.{key}, or leave data.sources out (--set 'data.sources=[]')",
            )
    names = [source.name for source in data.sources]
    for i, source in enumerate(data.sources):
        key = f"data.sources.{i}"
        if source.name in names[:i]:
            yield Conflict({f"{key}.name": source.name}, "another source has this name", "a name of its own")
        if source.task is not None:
            yield from known_task(f"{key}.task", source.task)
        yield from columns_of(f"{key}.columns", source.columns)
        yield from template_of(f"{key}.prompt_template", source.prompt_template)
        yield from check_rewards(config, f"{key}.rewards", source.rewards)
        yield from _validated(config, i)


def curriculum(config: RunConfig) -> Conflicts:
    """Bounds leave something between them, and one reward of each source says what is right."""
    this = config.data.curriculum
    if this is None:
        return
    if this.low >= this.high:
        yield Conflict(
            {"data.curriculum.low": this.low, "data.curriculum.high": this.high},
            "every row would be hard or easy",
            f"a low below {this.high:g}",
        )
    listed = {"rewards": config.rewards} if not config.data.sources else {}
    for i, source in enumerate(config.data.sources):
        listed[f"data.sources.{i}.rewards" if source.rewards else "rewards"] = source.rewards or config.rewards
    for key, rewards in listed.items():
        names = [reward.name for reward in rewards]
        short = [name.replace(":", ".").rpartition(".")[2] for name in names]
        if this.reward is None and "accuracy" not in names and len(names) > 1:
            yield Conflict(
                {"data.curriculum.reward": None, key: names},
                "which of them says what is right is not known",
                f"data.curriculum.reward: {names[0]}",
            )
        if this.reward is not None and this.reward not in (*names, *short):
            yield Conflict(
                {"data.curriculum.reward": this.reward, key: names},
                "there is no such reward among them",
                f"data.curriculum.reward: {names[0]}",
            )


def _validated(config: RunConfig, i: int) -> Conflicts:
    source, key = config.data.sources[i], f"data.sources.{i}"
    if source.validation is None and not source.held_out:
        return
    if source.validation is not None and source.held_out:
        yield Conflict(
            {f"{key}.held_out": source.held_out, f"{key}.validation.split": source.validation.split},
            "both say which rows validations ask",
            "one of the two",
        )
    if source.limit is not None and source.held_out >= source.limit:
        yield Conflict(
            {f"{key}.held_out": source.held_out, f"{key}.limit": source.limit},
            "no row would be left to train on",
            f"{key}.limit above {source.held_out}",
        )
    for name in ("task", "source"):
        if (value := getattr(config.validation, name)) is not None:
            yield Conflict(
                {f"validation.{name}": value, f"{key}.name": source.name},
                "this source names the rows that validations ask",
                f"validation.{name}: null, or neither held_out nor validation in any source",
            )
    if source.validation is not None:
        yield from columns_of(f"{key}.validation.columns", source.validation.columns)
