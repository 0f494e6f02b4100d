"""Answers that are text: the grading of the task `own` without a grader.

What a completion states is what it marks (`\\boxed{}`, `<answer>`, `####`, "the answer is", a last line in bold), else
its last line, or all of it. It is right if it equals the task's answer, apart from case, white space and the marks
around it. Two numbers are compared as numbers.
"""

from __future__ import annotations

import re
import unicodedata

from qerl.data.formulas.number import parse_number
from qerl.data.grading.extract import MAX_COMPLETION_CHARS, extract

_AROUND = " \t\n*_`\"'“”‘’.。,;:!?()[]"


def stated_text(completion: str) -> str | None:
    """What the completion states, None if it is empty or longer than any real one."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return None
    marked = extract(completion, "text")
    if marked.text is not None or marked.too_long:
        return marked.text
    return _answered(completion).rpartition("\n")[2].strip() or None


def is_same_text(completion: str, answer: str) -> bool:
    """Whether what a completion states, or all that it says after a thought, is the answer."""
    stated = stated_text(completion)
    if stated is None:
        return False
    first = re.split(r"(?<=[.。!?])\s", stated, maxsplit=1)[0]
    return any(_same(text, answer) for text in (stated, first, _answered(completion)))


def _answered(completion: str) -> str:
    return completion.rpartition("</think>")[2].strip()


def _same(text: str, answer: str) -> bool:
    one, other = _plain(text), _plain(answer)
    if one == other:
        return True
    numbers = parse_number(one), parse_number(other)
    return None not in numbers and numbers[0].equals(numbers[1])


def _plain(text: str) -> str:
    """Without what does not change the meaning: case, white space, marks around it."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.strip(_AROUND) or plain
