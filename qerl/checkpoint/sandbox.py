"""Chat templates and tokenizer.json are programs of the model's maker. They run in a process with limits.

A check at load alone would not do: a template may loop only for the messages that it waits for. So every prompt is
rendered in the worker (qerl/checkpoint/sandbox_worker.py), by transformers' own function; that adds about 0.25 ms per
prompt (0.36 instead of 0.12 with the embedded model, on a busy CPU). Encoding the text stays here, where the tokenizer
is, after tokenizer.json was tried once in the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 10  # processor time of a request
# The kernel limits processor time. This limit is only for a worker that hangs without using any: it is so long that a
# busy machine does not reach it.
REPLY_LIMIT_S = 300.0


class SandboxError(Exception):
    """What a chat template or a tokenizer did instead of giving a text."""


class _Worker:
    """One process that answers one request at a time; it is started anew after one that it did not survive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the worker replies: a text, and what was asked for beside it. Raises SandboxError."""
        with self._lock:
            process = self._process = self._process or _start()
            try:
                reply = _exchange(process, json.dumps({**request, "cpu_s": CPU_S}).encode() + b"\n")
            except BaseException:  # its reply would be taken for that to the next request
                self._end()
                raise
            if reply is None:
                code = self._end()
                raise SandboxError(
                    f"it takes more than {CPU_S} s of processor time"
                    if code == -signal.SIGXCPU
                    else f"it ended the process that worked with it (exit code {code})"
                )
        if "error" in reply:
            raise SandboxError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> int | None:
        if self._process is None:
            return None
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # one that the kernel ends has no exit code yet
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        return code


def _start() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("sandbox_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
    )


def _exchange(process: subprocess.Popen, request: bytes) -> dict[str, Any] | None:
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except OSError:
        return None
    line = process.stdout.readline() if poll.poll(REPLY_LIMIT_S * 1000) else b""
    return json.loads(line) if line.endswith(b"\n") else None


@functools.cache
def _worker(pid: int) -> _Worker:
    """The worker of the process `pid`: a forked child must not use the pipes of its parent."""
    worker = _Worker()
    atexit.register(worker.close)
    return worker


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
    switches: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of the messages in the tokenizer's chat template. Raises SandboxError if the template fails."""
    text = render_text(tokenizer, messages, add_generation_prompt, tools, switches)
    text = text.encode(errors="replace").decode()  # a line of stdin that is not UTF-8 holds half characters
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> str:
    """The text of the messages in the chat template, which is shown the schemas of `tools` and reads `switches` as
    variables. Raises SandboxError."""
    return _worker(os.getpid()).ask(_request(tokenizer, messages, add_generation_prompt, tools, switches))["text"]


def render_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of whole conversations, and what the template has between {% generation %} and {% endgeneration %}, as
    places of characters. Raises SandboxError."""
    reply = _worker(os.getpid()).ask({**_request(tokenizer, messages, False, tools, switches), "marked": True})
    return reply["text"], [(start, end) for start, end in reply["marked"]]


def _request(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    switches: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "template": tokenizer.get_chat_template(),
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "special": {**tokenizer.special_tokens_map, **(switches or {})},
        **({"tools": list(tools)} if tools else {}),
    }


def try_tokenizer(file: Path) -> None:
    """Load a tokenizer.json and encode a text with it. Raises SandboxError if that fails or takes too long."""
    _worker(os.getpid()).ask({"tokenizer": os.path.abspath(file)})  # the worker stays where it was started
