"""Errors that are the user's to fix: the CLI shows them as one line, without a traceback, and exits with 2.

Each message says what was given, why it cannot work, and what to write instead.
"""


class QerlError(Exception):
    """Base of all errors that the CLI prints without a traceback."""


class ConfigError(QerlError):
    """A recipe or `--set` that cannot be used: unknown key, wrong type, impossible combination."""


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
