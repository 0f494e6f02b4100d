"""Errors that are the user's to fix: the CLI shows them as one line, without a traceback, and exits with 2.

Each message says what was given, why it cannot work, and what to write instead.

Where the engine names a key of the recipe, the message carries it as a Key: the engine also serves commands that have
no recipe, and these show their option in its place (`qerl.cli.options`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Key:
    """A key of the recipe in a message. Keys are equal whatever they are set to."""

    name: str
    value: str = field(default="", compare=False)

    def set_to(self, value: str) -> Key:
        """The key with what to write there: `rollout.kernel=marlin`, or `--kernel marlin`."""
        return replace(self, value=value)

    def shown(self, options: Mapping[Key, str]) -> str:
        """What a command with these options says."""
        option = options.get(self)
        if not self.value:
            return option or self.name
        return f"{option} {self.value}" if option else f"{self.name}={self.value}"

    def __str__(self) -> str:
        return self.shown({})

    def __format__(self, spec: str) -> str:
        raise TypeError(f"{self.name} would become text here: write %s, and hand it to the error as a value")


MEMORY, CAP_GIB = Key("rollout.memory"), Key("memory.cap_gib")
ENGINE, KERNEL = Key("rollout.engine"), Key("rollout.kernel")
MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = Key("rollout.max_new_tokens"), Key("data.max_prompt_tokens")
SYSTEM_PROMPT, PROMPT_TEMPLATE = Key("data.system_prompt"), Key("data.prompt_template")


def counted(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_line(error: object) -> str:
    """What an error says, with the second line of one that begins with a heading; one word alone says too little."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return said if " " in said else f"{type(error).__name__} {said}".strip()


class QerlError(Exception):
    """Base of all errors that the CLI prints without a traceback.

    Made as a log record is: of a text, and of values for its %s, if it has any. Keys are such values.
    """

    options: Mapping[Key, str] = {}  # what the command that runs has in place of keys

    def __str__(self) -> str:
        text, *values = self.args or ("",)
        shown = [value.shown(self.options) if isinstance(value, Key) else value for value in values]
        return text % tuple(shown) if shown else str(text)


class ConfigError(QerlError):
    """A recipe or `--set` that cannot be used: unknown key, wrong type, impossible combination."""


def check_choices(options: object, **more: Collection[str]) -> None:
    """Raise ConfigError for a field of a command's options that has no value of its `Literal`, nor one of `more`.

    The command line checks this by itself; Python programs make such options too.
    """
    for name, hint in get_type_hints(type(options)).items():
        allowed = [value for each in (hint, *get_args(hint)) if get_origin(each) is Literal for value in get_args(each)]
        value, allowed = getattr(options, name), [*dict.fromkeys([*allowed, *(more.get(name, ()) if allowed else ())])]
        if allowed and value is not None and value not in allowed:
            raise ConfigError(f"--{name.replace('_', '-')} {value!r} is not known: write {', '.join(allowed)}")


class CheckpointError(QerlError):
    """A model folder that is missing, incomplete, of the wrong kind, or cannot be written."""


class DataError(QerlError):
    """A data set or a row of it that cannot be used."""


class RewardError(QerlError):
    """A reward that raised, or returned something that is not a finite number."""


class EngineError(QerlError):
    """A rollout engine that cannot be opened, ran out of memory, or disagrees with the trainer."""


class ParallelError(QerlError):
    """Another process of the run failed, is gone, or did not answer within the time limit."""


class MissingExtraError(QerlError):
    """An optional package that is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed, and this needs it: run `pip install 'qerl[{extra}]'`")
