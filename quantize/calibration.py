"""Calibration data for awq and gptq: rows of a jsonl file or a hub data set, as sequences of exactly one length.

Rows are shuffled with a fixed seed, written in the model's chat template, joined, and cut every `sequence_length`
tokens. So `256 x 2048` is that many tokens whatever the rows' lengths, and no padding enters the statistics.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import DataError
from qerl.tasks import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 0
SHUFFLE_BUFFER = 10_000  # rows of a hub data set, which is streamed
TEXT = ("text", "content")
CHAT = ("messages", "conversation", "conversations", "prompt")
ASK = ("prompt", "question", "problem", "instruction", "input")
REPLY = ("completion", "response", "answer", "solution", "output")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """Token sequences of one length, and what they were made of."""

    data: str
    sequences: list[list[int]]
    rows: int  # that went in
    unusable_rows: int

    def summary(self) -> dict:
        """For the report."""
        length = len(self.sequences[0])
        return {
            "data": self.data,
            "sequences": len(self.sequences),
            "sequence_length": length,
            "tokens": len(self.sequences) * length,
            "rows": self.rows,
            "unusable_rows": self.unusable_rows,
        }


def load_calibration(data: str, tokenizer: PreTrainedTokenizerBase, size: int, sequence_length: int) -> Calibration:
    """Up to `size` sequences of `sequence_length` tokens from `data` (jsonl, jsonl.gz, or a hub data set's name).

    Raises DataError if the data cannot be read, has no usable row, or too few tokens for one sequence.
    """
    tokens: list[int] = []
    used = unusable = 0
    example: Any = None
    for row in _shuffled_rows(data):
        ids = _tokens(row, tokenizer)
        if not ids:
            unusable, example = unusable + 1, row
            continue
        tokens += ids
        used += 1
        if len(tokens) >= size * sequence_length:
            break
    count = min(size, len(tokens) // sequence_length)
    if used == 0:
        raise DataError(
            f"{data}: none of {unusable} rows can be used for calibration (fields of one: {_fields(example)}): a row "
            "needs `messages`, `text`, or a question with an answer"
        )
    if count == 0:
        raise DataError(
            f"{data} gives {len(tokens)} tokens from {used} rows, less than one sequence of {sequence_length}: give "
            f"more rows, or write --sequence-length {len(tokens)} or less"
        )
    if count < size:
        logger.warning("%s is enough for %d sequences of %d tokens, not for %d", data, count, sequence_length, size)
    if unusable:
        logger.warning("%s: %d rows have no usable text (fields of one: %s)", data, unusable, _fields(example))
    cut = [tokens[start : start + sequence_length] for start in range(0, count * sequence_length, sequence_length)]
    return Calibration(data, cut, used, unusable)


def _shuffled_rows(data: str) -> Iterator[Any]:
    path = Path(data).expanduser()
    if path.is_file():
        yield from _file_rows(path)
    elif path.exists() or path.suffix or data.startswith((".", "/")):
        raise DataError(f"--calibration {data} is no file here: give a .jsonl file, or a hub data set's name")
    else:
        yield from _hub_rows(data)


def _file_rows(path: Path) -> Iterator[Any]:
    if path.suffix not in (".jsonl", ".gz"):
        raise DataError(f"--calibration {path} is no .jsonl or .jsonl.gz file: convert it to one JSON object a line")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"--calibration {path} cannot be read ({error}): copy or download it again") from error
    if not lines:
        raise DataError(f"--calibration {path} is empty: give a file with one JSON object a line")
    random.Random(SEED).shuffle(lines)
    for number, line in lines:
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON ({error}): correct or remove it") from error


def _hub_rows(name: str) -> Iterator[Any]:
    from datasets import load_dataset

    task = next((task for key, task in TASKS.items() if name in (key, task.hub) and task.hub), None)
    hub, config, split = (task.hub, task.hub_config, task.splits["train"]) if task else (name, None, "train")
    try:
        yield from load_dataset(hub, config, split=split, streaming=True).shuffle(SEED, buffer_size=SHUFFLE_BUFFER)
    except Exception as error:  # datasets, its readers and the network raise many kinds
        raise DataError(
            f"--calibration {name} is no file here and cannot be read from the hub ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}): check the name and the network, or give a .jsonl file"
        ) from error


def _tokens(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A row's tokens with the special tokens of its form; empty if there is no usable text in it."""
    if not isinstance(row, dict):
        return []
    messages = _messages(row)
    if messages and tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    text = "\n\n".join(message["content"] for message in messages) or _first_text(row, TEXT)
    ids = tokenizer(text)["input_ids"] if text else []
    end = tokenizer.eos_token_id
    return [*ids, end] if ids and end is not None and ids[-1] != end else ids


def _messages(row: dict) -> list[dict[str, str]]:
    for key in CHAT:
        turns = row.get(key)
        if isinstance(turns, list) and turns and all(_is_turn(turn) for turn in turns):
            reply = _first_text(row, REPLY) if key == "prompt" else ""
            return [*turns, *([{"role": "assistant", "content": reply}] if reply else [])]
    question, reply = _first_text(row, ASK), _first_text(row, REPLY)
    if not question:
        return []
    return [{"role": "user", "content": question}, *([{"role": "assistant", "content": reply}] if reply else [])]


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _first_text(row: dict, keys: Iterable[str]) -> str:
    return next((row[key] for key in keys if isinstance(row.get(key), str) and row[key].strip()), "")


def _fields(row: Any) -> str:
    return ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
