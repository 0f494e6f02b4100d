"""The sections `data` and `rewards` of a recipe: rows, where they come from, what completions earn, and their rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from qerl.base.http import VARIABLE, header_mistake, is_secret, secret_place, url_mistake, url_shown
from qerl.config.names import TASKS, unknown_name
from qerl.config.section import Conflict, Conflicts, Section, check_name, unknown, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class RewardConfig(Section):
    """One reward; the sum of weight * reward is what training maximizes. Text is its name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: object) -> object:
        return {"name": data} if isinstance(data, str) else data

    name: str = Field(
        min_length=1,
        description="registered name, path of a function (`file.py:f`, `package.module:f`), or URL of a reward server",
    )
    weight: float = Field(1.0, description="factor in the sum; 0 only logs the reward")
    args: dict[str, object] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float | None = Field(
        None, gt=0, description="seconds that one call of your own function, or of your grader, may take; null: 300"
    )


class SourceValidationConfig(Section):
    """Questions of one source that validations ask."""

    source: str | None = Field(
        None, min_length=1, description="hub id, file or folder; null: the rows of the source's task"
    )


class SourceConfig(Section):
    """One of several sources. What it leaves null is as in `data`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name in metrics: letters, digits, and _ . - between them"
    )
    weight: float = Field(1.0, gt=0, description="share of the prompts, beside the weights of the others")
    task: str | None = Field(None, min_length=1, description="task by name: prompt and grading; null: data.task")
    source: str | None = Field(
        None, min_length=1, description="hub id, file or folder; null: the rows of the source's task"
    )
    columns: dict[str, str] | None = Field(None, description="names of the source's columns; null: data.columns")
    grader: str | None = Field(None, min_length=1, description="your own grading of this source; null: data.grader")
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (), description="rewards of this source's completions; none: the recipe's rewards"
    )
    validation: SourceValidationConfig | None = Field(
        None, description="other rows that validations ask for this source; null: those of data.held_out"
    )


def _of_older_recipes(given: object) -> object:
    """A curriculum had keys of its own, of which `null` was without one and `{}` with their defaults."""
    return bool(given is not None) if given in (None, {}) else given


class DataConfig(Section):
    """The prompts and the answers they are graded against."""

    task: str = Field(min_length=1, description="task by name: its rows, prompt and grading")
    source: str | None = Field(
        None,
        min_length=1,
        description="hub id (`owner/name`, `owner/name:subset`), file or folder to read instead of the task's own rows",
    )
    split: str = Field("train", min_length=1, description="split that training reads")
    columns: dict[str, str] | None = Field(
        None,
        description="the source's names for question, answer and id, such as {question: problem, answer: solution}",
    )
    system_prompt: str | None = Field("default", description="system message; default: the task's; null: none")
    prompt_template: str = Field(
        "default", min_length=1, description="user message, with {question} in it; default: the task's"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are dropped, counted and named")
    limit: int | None = Field(None, ge=1, description="use only the first rows of each source, this many; null: all")
    held_out: int = Field(
        0, ge=0, description="the last rows of each source, this many, are validated and not trained on"
    )
    grader: str | None = Field(
        None,
        min_length=1,
        description="your own grading: file.py, file.py:function or package.module:function; null: the task's",
    )
    chat_template_kwargs: dict[str, object] = Field(
        default_factory=dict, description="switches of the chat template, such as {enable_thinking: false}"
    )
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = Field(
        (), description="several sources in place of one, each with a share of every step"
    )
    curriculum: Annotated[bool, BeforeValidator(_of_older_recipes)] = Field(
        False, description="rows are chosen by how many of their completions were right; false: in turn"
    )


COLUMNS = ("question", "answer", "id")  # the columns that a task reads
ASKING = ("prompt", "messages")  # other names of the question


def known_task(key: str, name: str) -> Conflicts:
    """There is a task of this name."""
    if name not in TASKS:
        yield unknown(key, "task", name, TASKS)


def columns_of(key: str, columns: Mapping[str, str] | None) -> Conflicts:
    """Only columns that a task reads are mapped."""
    for column, source in (columns or {}).items():
        if column not in (*COLUMNS, *ASKING):
            meant = f"{{{source}: {column}}}" if source in COLUMNS else "{question: THEIR_NAME, answer: THEIR_NAME}"
            yield Conflict(
                {f"{key}.{column}": source}, f"only our columns can be mapped ({', '.join(COLUMNS)})", f"{key}: {meant}"
            )


def template_of(key: str, template: str | None) -> Conflicts:
    """A template holds the question, and no other name."""
    if template is None or template == "default":
        return
    if "{question}" not in template:
        yield Conflict(
            {key: template},
            "it has no {question}, so no prompt would hold its problem",
            f"{key}: '{{question}} Put your final answer within \\boxed{{}}.', or default",
        )
    elif (name := unknown_name(template)) is not None:
        yield Conflict(
            {key: template},
            f"{{{name}}} would be printed as it stands, since only {{question}} is put in",
            f"the column {name} into the question of each row, or {{ {name} }} for the text in braces",
        )


def sources(config: RunConfig) -> Conflicts:
    """Each source has a name of its own and what one source could have, and nothing says two things of its rows."""
    data = config.data
    yield from _held_out(config)
    if not data.sources:
        return
    yield from unread(config, {"data.sources": "given"}, "each of several sources has its own", "data.source")
    names = [source.name for source in data.sources]
    for i, source in enumerate(data.sources):
        key = f"data.sources.{i}"
        if source.name in names[:i]:
            yield Conflict({f"{key}.name": source.name}, "another source has this name", "a name of its own")
        if source.task is not None:
            yield from known_task(f"{key}.task", source.task)
        yield from columns_of(f"{key}.columns", source.columns)
        yield from check_rewards(config, f"{key}.rewards", source.rewards)
        if source.validation is not None:
            yield from _asked_once(config, {f"{key}.validation": "given"})


def _held_out(config: RunConfig) -> Conflicts:
    """What data.held_out leaves and what it needs."""
    data = config.data
    if not data.held_out:
        return
    if data.sources and all(source.validation is not None for source in data.sources):
        why = "every source has a validation of its own"
        yield from unread(config, {"data.sources": "given"}, why, "data.held_out")
        return
    if data.limit is not None and data.held_out >= data.limit:
        yield Conflict(
            {"data.held_out": data.held_out, "data.limit": data.limit},
            "no row would be left to train on",
            f"data.limit above {data.held_out}",
        )
    yield from _asked_once(config, {"data.held_out": data.held_out})
    if config.validation.every is None:
        yield Conflict(
            {"data.held_out": data.held_out, "validation.every": None},
            "the rows that are held out would be neither trained on nor validated",
            f"validation.every: {max(1, config.run.steps // 10)}, or data.held_out: 0",
        )


def _asked_once(config: RunConfig, given: dict[str, object]) -> Conflicts:
    """Nothing else says which rows validations ask."""
    for name in ("task", "source"):
        if (value := getattr(config.validation, name)) is not None:
            yield Conflict(
                {f"validation.{name}": value, **given},
                "both say which rows validations ask",
                f"validation.{name}: null, or leave held_out and validation out of data",
            )


# Names that training/rewards/rewards.py registers: a misspelt one is noticed before anything heavy is imported.
REWARD_NAMES = ("accuracy", "format", "soft_overlong", "length", "judge", "environment")
GRADED = ("accuracy", "length")  # by the task's grading, or the user's own
OWN = "your own: path/to/file.py:function, package.module:function or the http://... URL of a reward server"


def is_url(name: str) -> bool:
    """Whether the name means a reward server."""
    return "://" in name


def without_secrets(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain values, with "(not shown)" for what may be a key in arguments of rewards or environment."""
    sources = [{**each, "rewards": _without(each["rewards"])} for each in recipe["data"]["sources"]]
    hidden = {"data": {**recipe["data"], "sources": sources}, "rewards": _without(recipe["rewards"])}
    if recipe.get("environment"):
        hidden["environment"] = {**recipe["environment"], "args": _hidden(recipe["environment"]["args"])}
    return {**recipe, **hidden}


def _without(rewards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "args": _hidden(each["args"])} for each in rewards]


def _hidden(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, name) for each in value]
    secret = isinstance(value, str) and is_secret(value, name, shortest=0)
    return "(not shown)" if secret and not VARIABLE.search(value) else value


def rewards(config: RunConfig) -> Conflicts:
    """Some reward has a weight, and none is listed twice."""
    yield from check_rewards(config, "rewards", config.rewards)


def check_rewards(config: RunConfig, key: str, listed: Sequence[RewardConfig]) -> Conflicts:
    """The same for the rewards that stand under `key`."""
    for i, reward in enumerate(listed):
        own = f"{key}.{i}.name"
        yield from check_name(own, "reward", reward.name, REWARD_NAMES, OWN)
        if is_url(reward.name) or reward.name == "judge":  # a function of the user's own may have such arguments
            yield from no_secrets(f"{key}.{i}.args", reward.args)
        if any(reward.name == earlier.name for earlier in listed[:i]):
            yield Conflict({own: reward.name}, "this reward stands twice", "it once, with the weights added")
    if listed and config.distill is None and all(reward.weight == 0 for reward in listed):
        yield Conflict(
            {f"{key}.0.weight": 0.0}, "no reward has a weight, so nothing would be learned", f"{key}.0.weight: 1"
        )
    for i, reward in enumerate(listed):
        yield from _limits(config, f"{key}.{i}", reward)


def no_secrets(own: str, args: Mapping[str, object]) -> Conflicts:
    """No header, URL or body of a request that stands under `own` holds a key, which files and errors would repeat."""
    headers, url = args.get("headers"), args.get("url")
    for name, value in headers.items() if isinstance(headers, Mapping) else ():
        if mistake := header_mistake(name, value):
            why, write = mistake
            yield Conflict({f"{own}.headers.{name}": "(not shown)"}, why, write)
    if isinstance(url, str) and (mistake := url_mistake(url)):
        yield Conflict({f"{own}.url": url_shown(url)}, mistake, "the URL up to /v1, such as http://localhost:8001/v1")
    if (place := secret_place(args.get("body"), f"{own}.body")) is not None:
        write = 'headers: {Authorization: "Bearer ${NAME}"}, and put the key into that variable'
        yield Conflict({place: "(not shown)"}, "a key there would be written into the run and its report", write)


def _limits(config: RunConfig, own: str, reward: RewardConfig) -> Conflicts:
    """Only what the user wrote has a time limit here."""
    graded = reward.name in GRADED and (config.data.grader or any(each.grader for each in config.data.sources))
    if reward.timeout_s is not None and not graded and (is_url(reward.name) or reward.name in REWARD_NAMES):
        asks = is_url(reward.name) or reward.name == "judge"
        why = "a server has its limit among its args" if asks else "it ends by itself"
        write = f"{own}.args.timeout_s" if asks else "it for your own functions only"
        yield Conflict({f"{own}.timeout_s": reward.timeout_s, f"{own}.name": reward.name}, why, write)
