"""What the columns of somebody's rows are: which asks, which answers, and of what kind the answers are."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qerl.base.errors import DataError
from qerl.config.data import ASKING
from qerl.data.examples import MISSING, look_up, present_rows
from qerl.data.formulas.number import parse_number
from qerl.data.messages import as_messages, read_messages
from qerl.data.rows import is_empty, local_rows, names_of

PEEK, COUNTED = 200, 10_000  # rows that are looked at, and that are counted
# By the habits of published data sets: OpenAI's, Alpaca's, GSM8K's, verl's and TRL's among them.
ASKS = ("prompt", "messages", "question", "conversations", "problem", "instruction", "input", "query", "text")
ANSWERS = ("answer", "solution", "final_answer", "ground_truth", "reward_model.ground_truth", "target", "label")
ANSWERS += ("expected_answer", "response", "completion", "output")
OWN = ("prompt", "messages", "question", "answer")  # which the task `own` finds by itself


@dataclass(frozen=True)
class Guess:
    """`question` and `answer` are columns (a dotted path reaches into nested ones), `answer` None if there is none."""

    question: str
    answer: str | None
    kind: Literal["number", "text", "none"]  # of the answers
    rows: int  # counted up to COUNTED
    sample: Mapping[str, Any]  # the first row

    @property
    def columns(self) -> dict[str, str]:
        """What `data.columns` has to name."""
        named = {"question": self.question} if self.question not in OWN else {}
        return named | ({"answer": self.answer} if self.answer not in (None, *OWN) else {})


def guess(source: str, columns: Mapping[str, str] | None = None) -> Guess:
    """The columns of a file or folder, of which `columns` may name those of question and answer.

    Raises DataError for one that cannot be read, or in which nothing asks.
    """
    given = {"question" if name in ASKING else name: column for name, column in (columns or {}).items()}
    read = local_rows(source, "train")
    first = list(itertools.islice(read, PEEK))
    rows = present_rows(source, first)
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    asked, answered = given.pop("question", None), given.pop("answer", None)
    question = next((name for name in ([asked] if asked else ASKS) if _asks(rows, name)), None)
    answers = [answered] if answered else ANSWERS
    answer = next((name for name in answers if name != question and _some(rows, name)), None)
    if question is None or (answered and answer is None) or given:
        wanted = ",".join(f"{name}={column}" for name, column in (columns or {}).items())
        raise DataError(
            f"{source} has no column {f'as --columns {wanted} says' if wanted else 'that asks'} (its columns: "
            f"{names_of(names)}): write --columns question=NAME,answer=NAME; a question is text or a list of {{role, "
            "content}, and an answer, where there is one, text or a number"
        )
    count = len(first) + sum(1 for _ in itertools.islice(read, COUNTED))
    return Guess(question, answer, _kind(rows, question, answer), count, rows[0])


def _asks(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a column holds questions: text, or messages. Raises DataError for lists that are not messages."""
    values = [row[name] for row in rows if not is_empty(row.get(name))]
    if not values:
        return False
    if (first := as_messages(values[0])) is not None:
        try:
            read_messages(first)
        except ValueError as error:
            raise DataError(
                f"the first row's {name} cannot be asked: {error}; write a list of {{role, content}} that ends with a "
                "message of the user, or of the assistant"
            ) from None
        return True
    return all(isinstance(value, str) for value in values)


def _some(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = (look_up(row, name) for row in rows)
    return any(isinstance(value, str | int | float) and not is_empty(value) for value in values)


def _kind(rows: Sequence[Mapping[str, Any]], question: str, answer: str | None) -> Literal["number", "text", "none"]:
    answers = [_reply(row, question) if answer is None else look_up(row, answer) for row in rows]
    found = [str(each) for each in answers if each is not MISSING and not is_empty(each)]
    if not found:
        return "none"
    return "number" if all(parse_number(text.rpartition("####")[2].strip()) is not None for text in found) else "text"


def _reply(row: Mapping[str, Any], question: str) -> str:
    """What the assistant says at the end of messages."""
    cell = as_messages(row.get(question))
    if cell is None:
        return ""
    try:
        return read_messages(cell).reply
    except ValueError:
        return ""
