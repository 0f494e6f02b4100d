"""What an own function is called with, and how the completion on which it fails is found."""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from qerl.base.errors import ConfigError, QerlError
from qerl.base.own.function import LateError, OwnFunctionError
from qerl.base.own.returned import ReturnedError
from qerl.data.tasks import Example

COLUMNS = ("completions", "completion_ids", "prompts", "question", "answer", "row", "task", "max_new_tokens", "step")
EPISODE_COLUMNS = ("episode_reward", "turns", "tool_calls")  # of runs with an environment
ENVIRONMENTS = (
    "environments"  # a column of the same, where the environments are objects of this process: these, as in TRL
)
LEAST_SHARE_S = 1.0  # a completion that takes less is not named as the one on which a function was late


def check_columns(
    named: str,
    parameters: Mapping[str, inspect.Parameter],
    args: Iterable[str],
    examples: Sequence[Example],
    further: Sequence[str] = (),
) -> None:
    """Raise ConfigError if a function needs a value that is neither one of its `args` nor a column.

    `further` are the columns of episodes.
    """
    columns = (*COLUMNS, *further, *sorted({key for example in examples for key in example.extra}), "log_metric")
    for key, parameter in parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and key not in (*columns, *args):
            if key == ENVIRONMENTS:
                raise ConfigError(
                    f"{named} asks for the environments themselves, which it gets where both are objects of a Python "
                    "program (qerl.train): write get_reward in the class and the reward `environment`, or take the "
                    "columns episode_reward and turns"
                )
            near = difflib.get_close_matches(key, columns, n=1)
            hint = f"did you mean {near[0]!r}? " if near else "write one that is there; "
            raise ConfigError(
                f"{named} asks for {key!r}, which is neither among its args nor a column: {hint}the columns are "
                f"{', '.join(columns)}"
            )


def first_to_fail(call: Callable[[int, float], object], count: int, timeout_s: float) -> int | None:
    """The first of `count` completions with which alone a function fails, or takes ten times its share of `timeout_s`.

    `call` calls the function with one completion within a time limit. None if there is no such completion, or if it is
    not found within twice the limit.
    """
    end = time.monotonic() + 2 * timeout_s
    share_s = min(timeout_s, max(LEAST_SHARE_S, 10 * timeout_s / count))
    for index in range(count):
        left_s = end - time.monotonic()
        if left_s <= 0:
            return None
        try:
            call(index, min(share_s, left_s))
        except LateError:
            return index if left_s >= share_s else None
        except OwnFunctionError:
            return index
        except (ReturnedError, QerlError):
            continue
    return None
