"""Chat templates and tokenizer.json are programs of the model's maker: they run in a worker with limits.

Every prompt is rendered in the worker, by transformers' own function, which adds well under a millisecond; a check at
load alone would miss a template that loops only for certain messages. jinja's sandbox keeps a template from reaching
other objects, and the kernel ends the worker when a request takes too much processor time or memory. Encoding stays in
this process, after tokenizer.json was tried once in the worker.

Special tokens in the text of others are read as text: a question that holds `<|im_end|>` cannot end the user's turn.
What a template is given has its special tokens between two characters that no text has, and `encode` reads these as any
other letters. The switch `special_tokens_in_text: true` of the chat template leaves them tokens.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qerl.base.errors import counted
from qerl.base.isolate import OwnFunctionError, Workers, serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 10  # processor time of a request
# The kernel limits processor time. This limit is only for a worker that hangs without using any: it is so long that a
# busy machine does not reach it.
REPLY_LIMIT_S = 300.0
MEMORY_BYTES = 2 * 2**30  # beside what the imports take
LONGEST = 2_000_000  # characters of a prompt, beside its messages eight times over
TOKENIZER_BYTES = 2**28
PROBE = f"What is {'1' * 64} + 4? {'a' * 64} {' ' * 64}ä中\n" * 4
MOST_TOKENS = 100 * len(PROBE)

_workers = Workers("renders prompts", __name__, needs="transformers")


SWITCH = "special_tokens_in_text"
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which Unicode keeps out of texts
_GUARDED = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|\\Z)", re.DOTALL)
_GUARDS = str.maketrans("", "", _OPEN + _CLOSE)


class SandboxError(Exception):
    """What a chat template or a tokenizer did instead of giving a text."""


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the worker replies: a text, and what was asked for beside it. Raises SandboxError."""
    try:
        reply = _workers.ask({**request, "cpu_s": CPU_S}, REPLY_LIMIT_S)
    except OwnFunctionError as error:
        late = signal.SIGXCPU.name in str(error)
        raise SandboxError(f"it takes more than {CPU_S} s of processor time" if late else f"it {error}") from error
    if "error" in reply:
        raise SandboxError(reply["error"])
    return reply


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
    switches: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of the messages in the tokenizer's chat template, with special tokens of its own only (unless a switch
    says otherwise). Raises SandboxError if the template fails."""
    text = render_text(tokenizer, messages, add_generation_prompt, tools, switches)
    text = text.encode(errors="replace").decode()  # a line of stdin that is not UTF-8 holds half characters
    return encode(tokenizer, text)


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> str:
    """The text of the messages in the chat template, which is shown the schemas of `tools` and reads `switches` as
    variables. It is for `encode`. Raises SandboxError."""
    return _ask(_request(tokenizer, messages, add_generation_prompt, tools, switches))["text"]


def render_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of whole conversations, and what the template has between {% generation %} and {% endgeneration %}, as
    places of characters. Raises SandboxError."""
    reply = _ask({**_request(tokenizer, messages, False, tools, switches), "marked": True})
    return reply["text"], [(start, end) for start, end in reply["marked"]]


def _request(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    switches: Mapping[str, Any] | None,
) -> dict[str, Any]:
    variables = {key: value for key, value in (switches or {}).items() if key != SWITCH}
    return {
        "template": tokenizer.get_chat_template(),
        "messages": guarded(tokenizer, [dict(message) for message in messages], switches),
        "add_generation_prompt": add_generation_prompt,
        "special": {**tokenizer.special_tokens_map, **variables},
        **({"tools": guarded(tokenizer, list(tools), switches)} if tools else {}),
    }


def guarded(tokenizer: PreTrainedTokenizerBase, value: Any, switches: Mapping[str, Any] | None = None) -> Any:
    """Messages or schemas with each special token in their texts marked as text, unless the switch says otherwise."""
    names = _names(tokenizer)
    if (switches or {}).get(SWITCH) or names is None:
        return value
    return _each_text(value, lambda text: names.sub(f"{_OPEN}\\g<0>{_CLOSE}", text.translate(_GUARDS)))


def named(tokenizer: PreTrainedTokenizerBase, value: Any, switches: Mapping[str, Any] | None = None) -> set[str]:
    """The special tokens that stand as text in messages or schemas."""
    found: set[str] = set()
    names = _names(tokenizer)
    if names is not None and not (switches or {}).get(SWITCH):
        _each_text(value, lambda text: (found.update(names.findall(text)), text)[1])
    return found


def said_of(rows: Sequence[str], names: set[str]) -> str:
    """What is said of rows whose texts hold special tokens."""
    held = ", ".join(sorted(names)[:3])
    return (
        f"{counted(len(rows), 'row')} (e.g. {', '.join(rows[:3])}) with {held}, special tokens of the tokenizer: there "
        f"they are read as text; data.chat_template_kwargs: {{{SWITCH}: true}} makes them tokens"
    )


def unguarded(text: str) -> str:
    """The text as people read it."""
    return text.translate(_GUARDS)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered text, whose marked special tokens are text."""
    if _OPEN not in text:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encode_with_places(tokenizer, text)[0]


def encode_with_places(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the characters of `text` that each stands for."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    for start, part, is_text in _parts(text):
        encoded = tokenizer(
            part,
            add_special_tokens=False,
            return_offsets_mapping=True,
            **({"split_special_tokens": True} if is_text else {}),
        )
        ids += encoded["input_ids"]
        places += [(start + first, start + last) for first, last in encoded["offset_mapping"]]
    return ids, places


def _parts(text: str) -> list[tuple[int, str, bool]]:
    """The parts of a rendered text: where each begins, and whether special tokens are text in it."""
    parts, at = [], 0
    for match in _GUARDED.finditer(text):
        parts += [(at, text[at : match.start()], False), (match.start(1), match[1], True)]
        at = match.end()
    return [part for part in (*parts, (at, text[at:], False)) if part[1]]


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _each_text(key, change): each if key == "role" else _each_text(each, change) for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_each_text(each, change) for each in value]
    return value


def _names(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """What finds a special token, the longest first; None if there is none."""
    return _pattern(frozenset(t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content))


@functools.lru_cache(32)
def _pattern(names: frozenset[str]) -> re.Pattern[str] | None:
    found = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, found))) if found else None


def try_tokenizer(file: Path) -> None:
    """Load a tokenizer.json and encode a text with it. Raises SandboxError if that fails or takes too long."""
    _ask({"tokenizer": os.path.abspath(file)})  # the worker stays where it was started


def render(request: dict[str, Any]) -> dict[str, Any]:
    """The messages in the chat template, as transformers writes them. Raises ValueError for a text too long."""
    render_jinja_template = template_module().render_jinja_template
    _limit(request["cpu_s"])
    marked = request.get("marked", False)
    (text,), places = render_jinja_template(
        [request["messages"]],
        tools=request.get("tools"),
        chat_template=request["template"],
        add_generation_prompt=request["add_generation_prompt"],
        return_assistant_tokens_mask=marked,
        **request["special"],
    )
    most = LONGEST + 8 * sum(len(str(part)) for part in [*request["messages"], *request.get("tools", ())])
    if len(text) > most:
        raise ValueError(f"it makes {len(text)} characters of a few messages, more than the {most} that are allowed")
    return {"text": text, **({"marked": places[0]} if marked else {})}


def probe(request: dict[str, Any]) -> str:
    """Load a tokenizer.json and encode a text. Raises ValueError if that makes far too many tokens."""
    from tokenizers import Tokenizer

    _limit(request["cpu_s"])
    if (size := os.path.getsize(request["tokenizer"])) > TOKENIZER_BYTES:
        raise ValueError(f"it has {size} bytes, more than any tokenizer.json")
    count = len(Tokenizer.from_file(request["tokenizer"]).encode(PROBE).ids)
    if count > MOST_TOKENS:
        raise ValueError(f"it makes {count} tokens of {len(PROBE)} characters")
    return ""


@functools.cache
def template_module() -> ModuleType:
    """transformers' module of chat templates and of the schemas of tools, without the rest of transformers if that is
    not loaded.

    The two packages around it are entered without running their `__init__`, which would take 0.6 s of processor time
    more, and are taken out again, so that who imports transformers later gets the whole; the distributions of all
    packages, which transformers lists for its checks of versions, take another 0.2 s. A type of torch stands in a hint
    only where torch is loaded, which for a schema transformers would do.
    tests/qerl/base/test_sandbox.py compares prompts with the whole package's.
    """
    name = "transformers.utils.chat_template_utils"
    if "transformers" in sys.modules:
        return importlib.import_module(name)
    listed = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = dict
    try:
        for package in ("transformers", "transformers.utils"):
            sys.modules[package] = importlib.util.module_from_spec(importlib.util.find_spec(package))
        module = importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = listed
        logging.getLogger("transformers").handlers.clear()  # the whole package adds its own
        for package in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
            del sys.modules[package]
    module.is_torch_available = lambda: "torch" in sys.modules
    return module


def _limit(cpu_s: int) -> None:
    spent = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_s, resource.RLIM_INFINITY))
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))


def _unlimited() -> None:
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS):
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return render(request) if "template" in request else {"text": probe(request)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except RecursionError:
        return {"error": "it calls itself, or nests, without end"}
    except BaseException as error:  # of jinja2, or a panic of the tokenizers library, which is no Exception
        return {"error": (str(error).strip().split("\n")[0] or type(error).__name__)[:500]}
    finally:
        _unlimited()


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(descriptor, _answer)
