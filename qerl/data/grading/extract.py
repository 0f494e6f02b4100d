r"""The answer that a completion states. The last occurrence of the first form that is found counts:

1. `\boxed{...}` (also \fbox, \framebox); empty ones are skipped, and a last one that is not closed means no answer.
2. `<answer>...</answer>`.
3. `#### N`, up to the end of the line, if the line looks like an answer.
4. "the answer is ...", "answer: ...", "答案是", up to the end of the sentence; or the line after the heading "Answer".
5. `**...**`, if the last line of the completion consists of it.

A completion that thinks first is searched after the last `</think>`, and as a whole only if nothing is found there. All
searches take linear time, and look at no more than MAX_ANSWER_CHARS characters of an answer.
"""

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

from qerl.data.formulas.number import ALTERS, NUMBER_WORDS, parse_number
from qerl.data.formulas.spelling import LABEL

MAX_COMPLETION_CHARS = 2_000_000  # a completion of 128k tokens has about 500k
MAX_ANSWER_CHARS = 1000
_MAX_LINE_CHARS = 300
_MAX_MENTIONS = 20
_MAX_BOXES = 1000
_SIGN = re.compile(r"(?<=\d)\s*(?:->|→|=>|</|<\|)")
_TAKEN_BACK = re.compile(r"\d|\b(?:no|not|wrong|incorrect|mistake|wait|or|plus|minus|times)\b", re.IGNORECASE)

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t\n]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_TOKEN = re.compile(r"[^\s{}$\\,;]+")
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_MENTION = re.compile(r"(?<![A-Za-z])answer(?![A-Za-z])|答案", re.IGNORECASE)
_LEAD = re.compile(
    r"(?:\s+to\s+(?:the|this|your)\s+(?:question|problem))?[*_`]{0,3}"
    r"(?:\s+(?:(?:should|must|would|will)\s+be|is|equals)\b|\s*(?:=|:|：|是|为|為)|\s*\n)\s*[*_]{0,3}\s*[:：]?\s*"
    r"(?:(?:therefore|thus|simply|just|then|hence|exactly|indeed|equal to|equals|approximately|about)\b[\s,:]*)*",
    re.IGNORECASE,
)
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_STATED_END = re.compile(
    r"\n|[.。](?=\s|$|\*|\")|[;；]|[,，]\s*(?!and\b|or\b)(?=[A-Za-z]{2})|\s(?:because|since|which|so)\b"
)
# Words to the end of the line without a digit or a sign: after a mark, in brackets or after a conjunction.
_PLAIN = r"[^\d+*/^=<>\\$%]"
_REMARK = re.compile(
    rf"\s*(?:\({_PLAIN}*\)\W*|(?:[,;:—–]\s|\s-+\s|\s(?=(?:and|because|since|which|so|as|in)\b)){_PLAIN}*"
    r"|\s[^\w\s+*/^=<>\\$%(\[-]+\s*)$",
    re.IGNORECASE,
)
_CONJUNCTIONS = frozenset({"and", "to"})
_MATRIX = re.compile(r"[^\n]{0,20}?\\begin\{(\w+)\}.*?\\end\{\1\}", re.DOTALL)
_BOLD_LINE = re.compile(r"(?:\*\*|__)([^*\n]+?)(?:\*\*|__)[.!]?")
# After "the answer is", these words state no answer ("I checked that the answer is correct").
_VERDICTS = {"correct", "incorrect", "right", "wrong", "valid", "unique", "reasonable", "consistent", "found", "given"}


@dataclass(frozen=True)
class Extracted:
    """The text that a completion states as its answer; `too_long` if it is longer than any real answer."""

    text: str | None
    too_long: bool = False


NOTHING = Extracted(None)
TOO_LONG = Extracted(None, too_long=True)


def extract(completion: str, kind: Literal["number", "math", "text"]) -> Extracted:
    """The answer of a completion, by the rules at the top of this file."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return TOO_LONG
    _, thought, after = completion.rpartition("</think>")
    if thought:
        found = _marked(after, kind)
        if found != NOTHING:
            return found
    return _marked(completion, kind)


def _marked(text: str, kind: str) -> Extracted:
    """The answer that a text marks in any form."""
    box = _last_box(text)
    if box is not None:
        return box
    for candidate in (_last_tag(text), _last_hashes(text, kind), _last_mention(text, kind), _last_bold(text, kind)):
        if candidate:
            return Extracted(candidate) if len(candidate) <= MAX_ANSWER_CHARS else TOO_LONG
    return NOTHING


def _last_box(text: str) -> Extracted | None:
    """The content of the last box that is not empty; NOTHING if the last box is not closed; None without a box."""
    for opening in reversed(deque(_BOX.finditer(text), maxlen=_MAX_BOXES)):
        content = _box_at(text, opening.end())
        if content is not None and content.text != "":
            return Extracted(LABEL.sub("", content.text, count=1).strip() or None) if content.text else content
    return None


def _box_at(text: str, start: int) -> Extracted | None:
    """The content, beginning at `start`, of a box; NOTHING if the box is not closed, None if it has no content."""
    limit = start + MAX_ANSWER_CHARS + 2
    if text[start : start + 1] != "{":
        token = _BARE_TOKEN.match(text, start, limit)
        return Extracted(token[0].rstrip(".")) if token else None
    depth = 0
    for brace in _BRACE.finditer(text, start, limit):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return Extracted(text[start + 1 : brace.start()].strip())
    return TOO_LONG if limit < len(text) else NOTHING


def _last_tag(text: str) -> str | None:
    """The content of the last `<answer>` that has a closing tag."""
    end = deque(_TAG_END.finditer(text), maxlen=1)
    opening = deque(_TAG.finditer(text, 0, end[0].start()), maxlen=1) if end else ()
    return text[opening[0].end() : end[0].start()].strip() if opening else None


def _last_hashes(text: str, kind: str) -> str | None:
    """The rest of the line after the last `####` that is followed by an answer."""
    end = len(text)
    for _ in range(_MAX_MENTIONS):
        start = text.rfind("####", 0, end)
        if start < 0:
            return None
        line = text[start + 4 : start + 4 + _MAX_LINE_CHARS].lstrip().split("\n", 1)[0].strip(" #*\t")
        alone = _before_sign(line.replace("**", ""))
        for stated in (line, without_remark(line), alone, without_remark(alone)):
            if _is_answer(stated, kind):
                return stated
        end = start
    return None


def _before_sign(line: str) -> str:
    """The line up to an arrow or a tag behind a number, unless what follows takes it back or holds another.

    A point ends nothing: "#### 18. Add the numbers" is the heading of a step.
    """
    end = _SIGN.search(line)
    rest = "" if end is None else line[end.start() :]
    return line if end is None or _TAKEN_BACK.search(rest) else line[: end.start()].strip()


def without_remark(text: str) -> str:
    """The value that a text begins with, if what follows are words that change no value: "36 and so it is"."""
    remark = _REMARK.search(text)
    if remark is None or remark.start() == 0:
        return text
    rest = remark[0].strip()
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", rest)}
    changed = ALTERS - _CONJUNCTIONS - (NUMBER_WORDS if rest.startswith("(") else frozenset())
    return text if words & changed else text[: remark.start()].strip()


def _last_bold(text: str, kind: str) -> str | None:
    """The last line of the text, if all of it is bold. Bold text elsewhere may be a step."""
    line = text[-_MAX_LINE_CHARS:].rstrip().rpartition("\n")[2].strip()
    bold = _BOLD_LINE.fullmatch(line)
    if bold is None:
        return None
    stated = _statement(bold[1].strip(), kind)
    return stated if _is_answer(stated, kind) else None


def _last_mention(text: str, kind: str) -> str | None:
    """What the last "the answer is" with a value after it states."""
    for mention in reversed(deque(_MENTION.finditer(text), maxlen=_MAX_MENTIONS)):
        lead = _LEAD.match(text, mention.end(), mention.end() + _MAX_LINE_CHARS)
        if lead is None:
            continue
        rest = text[lead.end() : lead.end() + _MAX_LINE_CHARS].lstrip("*_ \n\t")
        stated = _statement(rest, kind)
        if _is_answer(stated, kind):
            return stated
    return None


def _is_answer(text: str, kind: str) -> bool:
    """Whether a text that stands where an answer does is one."""
    if kind == "text":
        return text != "" and text.lower().rstrip(".") not in _VERDICTS
    return bool(parse_number(text, algebra=kind == "math") or (kind == "math" and _reads_as_math(text)))


def _statement(rest: str, kind: str) -> str:
    """The formula that the text begins with, or its first sentence or clause if it begins with none.

    Of a text, it is the first line: "Paris, in France" is one answer.
    """
    if kind == "text":
        return rest.partition("\n")[0].strip(" *_`\t")
    formula = _DELIMITED.match(rest)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    matrix = _MATRIX.match(rest)
    if matrix:
        return matrix[0]
    return _STATED_END.split(rest, maxsplit=1)[0].strip(" *_`!\t")


def _reads_as_math(text: str) -> bool:
    """Whether a text that is not marked as a formula looks like one, or is a single word, rather than prose."""
    if not text or text.lower() in _VERDICTS:
        return False
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", re.sub(r"\\(?:begin|end|text|mathrm)\{\w+\}", "", text))
    return len(text.split()) == 1 or (not words and bool(re.search(r"[\d\\=+^]", text)))
