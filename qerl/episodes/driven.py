"""The one form that every kind of environment takes: reset with a row, step with what the model wrote, end.

Here stand also the values that pass between the model, its environment and what samples. A message is a mapping with
`role` and `content`; a tool's message has the tool's `name` too. `Stepped` drives a class of the user's own, `Tooled`
plain functions as tools and the objects of TRL's `environment_factory`.
"""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from qerl.base.isolate import LARGEST, short

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
    timeout_s: float = 60.0  # of one reset or step


@dataclass(frozen=True)
class Start:
    """How an episode begins: the row for the environment, and the prompt that holds unless its reset says otherwise."""

    row: Mapping[str, Any]
    messages: tuple[Message, ...]
    prompt_ids: Sequence[int]
    seed: int = 0  # the same for all episodes of a prompt, which so begin alike


PATIENCE_S = 1.0  # after which a shared loop that starts nothing counts as blocked

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def awaited(returned: Any) -> Any:
    """What `returned` ends with if it can be awaited, and `returned` as it is if not. Raises what it raised.

    Coroutines run on one event loop that the episodes of a process share. Libraries keep locks and connections for as
    long as the process lives, and these work on the loop that they were first used on. With a loop for each call the
    second of two episodes waited forever (verifiers 0.4), and a client opened in `reset` could not be used in `step`.
    A coroutine that blocks holds up the others of its loop; those that it keeps from starting get loops of their own.
    """
    if not inspect.isawaitable(returned):
        return returned
    began, claim = threading.Event(), threading.Lock()
    future = asyncio.run_coroutine_threadsafe(_on_shared_loop(returned, began, claim), _shared_loop())
    if not began.wait(PATIENCE_S) and claim.acquire(blocking=False):
        return asyncio.run(_value(returned))
    value, error = future.result()
    if error is not None:
        raise error
    return value


async def _on_shared_loop(
    returned: Awaitable[Any], began: threading.Event, claim: threading.Lock
) -> tuple[Any, BaseException | None]:
    """Its value or what it raised, unless another loop has claimed it.

    What it raised is returned because a SystemExit that leaves a task would end the loop for all episodes.
    """
    if not claim.acquire(blocking=False):
        return None, None
    began.set()
    try:
        return await returned, None
    except BaseException as error:
        return None, error


async def _value(returned: Awaitable[Any]) -> Any:
    return await returned


def _shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="coroutines", daemon=True).start()
    return _loop


NO_TOOLS = ("reset", "step", "close", "get_reward")


class BadEnvironmentError(Exception):
    """What an environment returned cannot be used. Says what it was, beginning with a verb."""


class Driven(Protocol):
    """One environment in one episode. A call may raise anything."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Begin an episode."""

    def step(self, action: Action) -> Reply:
        """Take a turn of the model."""

    def end(self) -> float:
        """What the episode earns beside the rewards of its steps; called once, when it has ended."""


class Stepped:
    """A class of the user's own, which has `reset` and `step`:

    class Guess:
        def reset(self, example, seed):          # either may be left out
            self.secret = example["answer"]
            return "Guess."                       # text for the end of the prompt; messages in place of it; or None

        def step(self, action):                   # text; with a parameter called `message`, the assistant's message
            return "Higher.", 0.0, False          # observation (text, messages or None), reward, done
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        names = inspect.signature(environment.step).parameters
        self._by_message = "message" in names

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        return first_reply(called(self.environment.reset, row, seed))

    def step(self, action: Action) -> Reply:
        given = {"message": action.message} if self._by_message else {}
        returned = awaited(self.environment.step(**given) if given else self.environment.step(action.text))
        observation, reward, done = _three(returned)
        return Reply(messages_of(observation), reward, done, len(action.calls), len(action.mistakes))

    def end(self) -> float:
        return _final(self.environment)


class Tooled:
    """Plain functions as tools, and the methods of an object as TRL's `environment_factory` takes it.

    Public methods are tools, `reset(**row)` begins an episode, and `get_reward()`, if there is one, is its reward. An
    episode ends with the first turn that asks for no tool.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], environment: Any = None) -> None:
        self._tools = {function.__name__: function for function in [*functions, *methods_of(environment)]}
        self.environment = environment

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        if self.environment is None:
            return Reply()
        return first_reply(called(self.environment.reset, row, seed))

    def step(self, action: Action) -> Reply:
        results = [_whole(self._result(call)) for call in action.calls]
        results += [("unknown", {"error": mistake}, True) for mistake in action.mistakes]
        messages = tuple({"role": "tool", "name": _shown(name), "content": str(text)} for name, text, _ in results)
        failed = sum(wrong for _, _, wrong in results)
        return Reply(messages, 0.0, not results, len(results), failed)

    def end(self) -> float:
        return _final(self.environment)

    def _result(self, call: Call) -> tuple[str, Any, bool]:
        """(name, what the tool returned, whether it failed). An error is told to the model, which may do better."""
        try:
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name}; the tools are {', '.join(self._tools)}")
            return call.name, awaited(self._tools[call.name](**call.arguments)), False
        except Exception as error:
            return call.name, {"error": str(error) or type(error).__name__}, True


def _whole(result: tuple[str, Any, bool]) -> tuple[str, Any, bool]:
    """A tool's result, or an error in its place if its text is none: a model can write half a character in a call."""
    name, returned, failed = result
    text = str(returned)
    if _shown(text) == text:
        return name, text, failed
    return name, {"error": "the result holds half a character" if not failed else _shown(text)}, True


def _shown(text: str) -> str:
    """The text with a question mark for each half of a character."""
    return text.encode(errors="replace").decode()


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """The tools of an object as TRL finds them: the public methods of its class that neither begin nor end it."""
    if environment is None:
        return []
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)  # on the class: no property is called
    names = [name for name, _ in found if not name.startswith("_") and name not in NO_TOOLS]
    return [getattr(environment, name) for name in names]


def called(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> Any:
    """What `reset` returns for the arguments that it names, of the row's columns, the row (`example`) and the seed."""
    given = {**row, "example": dict(row), "seed": seed}
    parameters = inspect.signature(reset).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in named if name in given]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = list(dict.fromkeys([*names, *row]))
    return awaited(reset(**{name: given[name] for name in names}))


def messages_of(observation: Any) -> tuple[Message, ...]:
    """An observation as messages: text is one of the user, None is none. Raises BadEnvironmentError."""
    if observation is None or observation == "":
        return ()
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    messages = [observation] if isinstance(observation, Mapping) else observation
    if isinstance(messages, list | tuple) and all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each for each in messages
    ):
        return tuple(dict(message) for message in messages)
    raise BadEnvironmentError(
        f"returned {short(observation)} as its observation: return text, None, or messages with role and content"
    )


def checked(reply: Reply) -> Reply:
    """A reply whose messages every chat template can be given: contents are text. Raises BadEnvironmentError."""
    messages = tuple(map(_checked, reply.messages))
    return replace(reply, messages=messages, prompt=reply.prompt and tuple(map(_checked, reply.prompt)))


def _checked(message: Message) -> Message:
    text = message.get("content")
    if text is None:
        text = ""
    if isinstance(text, list | tuple):  # as peers write text: parts, without pictures
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in text]
        text = "".join(parts) if all(isinstance(part, str) for part in parts) else text
    if not isinstance(text, str):
        raise BadEnvironmentError(f"returned a message with the content {short(text)}: write text, or parts of text")
    found = {**message, "content": text}
    try:
        json.dumps(found, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadEnvironmentError("returned text with half a character (a lone surrogate): write whole ones") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEnvironmentError(f"returned a message that is no JSON ({error}): write role and content") from None
    return found


def first_reply(returned: Any) -> Reply:
    """What a reset returned: text is added to the prompt, and messages stand in its place."""
    messages = messages_of(returned)
    if isinstance(returned, str) or returned is None:
        return Reply(messages)
    return Reply(prompt=messages)


def _three(returned: Any) -> tuple[Any, float, bool]:
    """Observation, reward and done, of a tuple or a mapping."""
    if isinstance(returned, Mapping):
        if "done" not in returned:
            raise BadEnvironmentError(f"returned {short(returned)}: a mapping needs observation, reward and done")
        returned = returned.get("observation"), returned.get("reward", 0.0), returned["done"]
    if not isinstance(returned, list | tuple) or len(returned) != 3:
        raise BadEnvironmentError(f"returned {short(returned)}: return (observation, reward, done)")
    observation, reward, done = returned
    return observation, number(reward), flag(done)


def number(value: Any) -> float:
    """A reward, of which None is 0. Raises BadEnvironmentError for what is not a finite number, or above LARGEST."""
    try:
        found = 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= LARGEST or isinstance(value, str):
        most = f" of at most {LARGEST:g}" if math.isfinite(found) else ""
        raise BadEnvironmentError(f"returned {short(value)} as its reward: return a finite number{most}")
    return found


def flag(value: Any) -> bool:
    """Whether an episode is done. Raises BadEnvironmentError for a text, of which "False" would count as true."""
    if isinstance(value, str):
        raise BadEnvironmentError(f"returned {short(value)} as done: return True or False")
    return bool(value)


def _final(environment: Any) -> float:
    get_reward = getattr(environment, "get_reward", None)
    return 0.0 if get_reward is None else number(awaited(get_reward()))
