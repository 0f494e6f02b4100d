"""A process that does what a model's tokenizer files say, so that they cannot hang or fill the process that asks.

`qerl/checkpoint/sandbox.py` starts it and sends one JSON object per line. It renders a chat template, or loads a
tokenizer.json and encodes a text. The kernel ends it when a request takes more processor time than it may; memory is
limited too. transformers renders in jinja's sandbox, which keeps a template from reaching other objects, but lets it
loop, grow a text without end, or compute 9**9**9, which no signal interrupts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 2 * 2**30  # beside what the imports take
LONGEST = 2_000_000  # characters of a prompt, beside those of its messages eight times over
TOKENIZER_BYTES = 2**28
PROBE = f"What is {'1' * 64} + 4? {'a' * 64} {' ' * 64}ä中\n" * 4
MOST_TOKENS = 100 * len(PROBE)


def render(request: dict[str, Any]) -> dict[str, Any]:
    """The messages in the chat template, as transformers writes them. Raises ValueError for a text too long."""
    render_jinja_template = _renderer()
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
def _renderer() -> Callable[..., Any]:
    """transformers' function that renders a chat template, without the rest of transformers.

    The two packages around its module are entered without running their `__init__`, which would take 0.6 s of processor
    time more; the distributions of all packages, which transformers lists for its checks of versions, another 0.2 s.
    tests/qerl/checkpoint/test_sandbox.py compares prompts with those of the whole package.
    """
    for name in ("transformers", "transformers.utils"):
        sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    importlib.metadata.packages_distributions = dict
    return importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template


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


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides what Ctrl-C means
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin.buffer:
        replies.write(json.dumps(_answer(json.loads(line))) + "\n")
        replies.flush()
        _renderer()  # the next request will need it


if __name__ == "__main__":
    main()
