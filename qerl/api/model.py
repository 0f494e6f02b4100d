"""`qerl.load`: a base, a run, an adapter or a merged model, open to generate."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from qerl.api.arguments import as_before, check_keywords, model_name, spelled_out
from qerl.base.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from qerl.api.run import Run
    from qerl.cli.chat import Opened

Messages = Sequence[Mapping[str, str]]


class Asked(TypedDict, total=False):
    """What `Model.generate` may be told."""

    max_new_tokens: int
    """Tokens of a completion at most; default: 512."""
    temperature: float
    """Default: 0, which is greedy."""
    top_p: float
    """Default: 1, which is off."""
    system_prompt: str | None
    """Default: none."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the chat template; default: those that the run trained with."""
    seed: int
    """Of the sampling; default: 0."""


class Model:
    """An open model. It holds the card's memory until `close`, or until the end of a `with` block."""

    def __init__(self, opened: Opened) -> None:
        self._opened: Opened | None = opened

    @overload
    def generate(self, prompt: str | Messages, **asked: Unpack[Asked]) -> str: ...

    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Messages], **asked: Unpack[Asked]) -> list[str]: ...

    @spelled_out(Asked)
    def generate(
        self, prompt: str | Messages | Sequence[str] | Sequence[Messages], **asked: Unpack[Asked]
    ) -> str | list[str]:
        """The model's completion of a prompt, or of each prompt of a list; `asked` is what `Asked` has.

        A prompt is a text, which becomes a message of the user, or a list of messages (`role`, `content`). It is
        rendered by the checkpoint's chat template, as in training. Raises EngineError for a prompt that leaves no room
        in the context, and ConfigError for what is not a prompt or not such a value.
        """
        from qerl.checkpoint.load import check_switches
        from qerl.engine.interface import SamplingParams

        if self._opened is None:
            raise EngineError("this model was closed: open it again with qerl.load")
        check_keywords(asked, [*Asked.__annotations__], "generate")
        _check_asked(prompt, asked)
        alone = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], Mapping))
        prompts = [prompt] if alone else list(prompt)
        tokens, switches = asked.get("max_new_tokens", 512), asked.get("chat_template_kwargs")
        sampling = SamplingParams(tokens, asked.get("temperature", 0.0), asked.get("top_p", 1.0))
        with as_before():
            check_switches(self._opened.tokenizer, switches or {}, "chat_template_kwargs")
            messages = [_messages(each, asked.get("system_prompt")) for each in prompts]
            ids = [self._opened.rendered(each, tokens, switches) for each in messages]
            completions = self._opened.engine.generate(ids, sampling, seed=asked.get("seed", 0)) if ids else []
        texts = [self._opened.text(completion) for completion in completions]
        return texts[0] if alone else texts

    def close(self) -> None:
        """Give the card's memory back."""
        if self._opened is not None:
            self._opened.engine.close()
        self._opened = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    model: str | os.PathLike | Run,
    *,
    adapter: str | os.PathLike | Run | None = None,
    engine: Literal["auto", "transformers", "vllm"] = "auto",
    memory: float | None = None,
    gpu: int | None = None,
    context: int = 4096,
) -> Model:
    """Open a base, NVFP4 folder, run, adapter or merged model, on the engine that trains and evaluates.

    `adapter` is applied to the model; `memory` is vLLM's budget on the card (GiB, or up to 1 a share); `context` is the
    longest prompt and completion together, in tokens. Raises QerlError, before weights are loaded if possible.
    """
    from qerl.base.devices import choose_card
    from qerl.cli.chat import OPTIONS, open_chat
    from qerl.cli.options import options_named
    from qerl.engine.options import EngineOptions

    if not isinstance(context, int) or context < 2:
        raise ConfigError(
            f"context {context!r} has no room for a prompt and its completion: write 2 or more, in tokens"
        )
    if not isinstance(memory, int | float | None):
        raise ConfigError(f"memory is {memory!r}: write GiB, or a share of the card up to 1, such as 0.9")
    name = model_name(model)
    with as_before(), options_named(OPTIONS):
        choose_card(gpu=gpu)
        options = EngineOptions(engine=engine, memory=memory)
        return Model(open_chat(name, None if adapter is None else model_name(adapter), options, context))


def _check_asked(prompt: object, asked: Asked) -> None:
    """Raise ConfigError for what is neither a prompt nor a list, and for numbers that no sampling has."""
    items = [prompt] if isinstance(prompt, str) else prompt
    listed = isinstance(items, Sequence) and not isinstance(items, bytes | bytearray)
    if not listed or not all(
        isinstance(each, str | Mapping) or (isinstance(each, list | tuple) and each) for each in items
    ):
        raise ConfigError(f"{prompt!r:.60} is not a prompt: give a text, a list of messages, or a list of either")
    for name, kinds, fits, words in (
        ("max_new_tokens", int, lambda value: value >= 1, "1 or more, a whole number"),
        ("temperature", int | float, lambda value: 0 <= value < math.inf, "0 (greedy) or more"),
        ("top_p", int | float, lambda value: 0 < value <= 1, "more than 0 and at most 1"),
        ("seed", int, lambda value: abs(value) < 2**63, "a whole number"),
        ("system_prompt", str | None, lambda value: True, "a text"),
        ("chat_template_kwargs", Mapping | None, lambda value: True, "a mapping, such as {'enable_thinking': False}"),
    ):
        if name in asked and not (isinstance(asked[name], kinds) and fits(asked[name])):
            raise ConfigError(f"{name} is {asked[name]!r:.60}: write {words}")


def _messages(prompt: str | Messages, system_prompt: str | None) -> list[dict[str, str]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}]
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ConfigError(f"{message!r} is no message: write {{'role': 'user', 'content': 'text'}}")
    return [*system, *map(dict, prompt)]
