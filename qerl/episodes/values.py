"""The values that pass between the model, its environment and what samples. A leaf module: it imports nothing of ours.

A message is a mapping with `role` and `content`; that of a tool has the tool's `name` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Schema = dict[str, Any]  # of a tool, as chat templates take it

Ending = Literal["done", "turns", "tokens", "failed"]  # the environment's word, a limit, or an error of it


@dataclass(frozen=True)
class Call:
    """A tool that the model asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """What the model wrote in one turn: its text, the tool calls in it, and what begins like a call and is none."""

    text: str
    calls: tuple[Call, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The turn as a message of the assistant."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in self.calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True)
class Reply:
    """What an environment answers. `prompt` is set by a reset alone: messages in place of the row's own."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    prompt: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Turn:
    """One message of an episode as people read it."""

    role: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Episode:
    """A finished exchange. `token_ids` are all tokens after the prompt: the model's and the environment's."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # 0.0 on tokens that the model did not write
    written: list[bool]  # whether the model wrote the token; the others have no loss
    turns: tuple[Turn, ...]
    answer: str  # the model's last turn, as text
    reward: float  # of the environment, over all steps
    ended: Ending
    truncated: bool  # a limit of tokens ended it
    error: str | None  # why the environment failed
    tool_calls: int
    tool_errors: int
    cut: int  # observations of which only the beginning was shown
    waited_s: float
    environment: Any = None  # the object itself, if it is of this process
    experts: Any = None  # uint8 (tokens, layers, k) as an engine's completions have them: of prompt and `token_ids`

    @property
    def model_turns(self) -> int:
        """How often the model spoke."""
        return sum(turn.role == "assistant" for turn in self.turns)


@dataclass(frozen=True)
class Limits:
    """When an episode ends by itself. Times are in seconds."""

    max_turns: int = 8  # of the model
    max_tokens: int = 4096  # of the model and the environment together, after the prompt
    context: int = 1 << 30  # tokens of prompt and episode together
    max_turn_tokens: int | None = None  # of one turn of the model
    max_observation_tokens: int | None = None  # of one message of the environment; longer ones are cut
    timeout_s: float = 60.0  # of one reset or step
    failure_reward: float = 0.0  # of an episode whose environment failed


@dataclass(frozen=True)
class Start:
    """How an episode begins: the row for the environment, and the prompt that holds unless its reset says otherwise."""

    row: Mapping[str, Any]
    messages: tuple[Message, ...]
    prompt_ids: Sequence[int]
    seed: int = 0  # the same for all episodes of a prompt, which so begin alike
