"""Recipe keys in what the engine says, as the options of a command that has these instead.

The engine speaks of `rollout.memory`, which is right while a recipe trains; `qerl eval` and `qerl chat` have --memory.
What is wrong in a recipe (ConfigError) keeps its keys: a run's config.yaml has them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from qerl.errors import CheckpointError, EngineError

ENGINE_LOGGERS = ("qerl.engine", "qerl.plan", "qerl.vllm_plugin")
ENGINE_OPTIONS = {  # recipe key in an error of the engine -> what sets it in every command that opens one
    "rollout.memory": "--memory",
    "memory.cap_gib": "--cap-gib",
    "rollout.kernel": "--kernel",
    "rollout.engine": "--engine",
    "rollout.max_new_tokens": "--max-new-tokens",
}


@contextmanager
def options_named(options: Mapping[str, str]) -> Iterator[None]:
    """Within it, errors and log lines of the engine name `options` (recipe key -> option) where they named keys."""

    def rename(record: logging.LogRecord) -> bool:
        if record.name.startswith(ENGINE_LOGGERS):
            record.msg = in_options(str(record.msg), options)
        return True

    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(rename)
    try:
        yield
    except (EngineError, CheckpointError) as error:
        error.args = (in_options(str(error), options),)
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(rename)


def in_options(text: str, options: Mapping[str, str]) -> str:
    """`text` with each key as its option: `rollout.kernel=marlin` becomes `--kernel marlin`."""
    keys = "|".join(map(re.escape, options))
    return re.sub(rf"(?<![\w.])({keys})(=|: (?=\w+$)|(?![\w]))", lambda found: _option(found, options), text)


def _option(found: re.Match[str], options: Mapping[str, str]) -> str:
    return options[found[1]] + (" " if found[2] else "")
