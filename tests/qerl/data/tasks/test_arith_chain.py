"""qerl.data.tasks.arith_chain: problems are reproducible, the splits share none, and worked solutions are right."""

import operator
import re
import string

import pytest

from qerl.base.errors import DataError
from qerl.data.tasks import get_task, grade
from qerl.data.tasks.arith import split_of
from qerl.data.tasks.arith_chain import (
    EVENTS,
    MAX_RESULT,
    MAX_STEPS,
    MIN_STEPS,
    OPENINGS,
    TASK_ROWS,
    problem,
    problems,
    rows,
)

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_a_problem_depends_only_on_split_seed_and_index() -> None:
    expected = list(problems("train", 5, 10, start=100))
    assert [problem("train", 5, index) for index in reversed(range(100, 110))] == expected[::-1]
    assert problem("train", 6, 100) != expected[0]
    assert problem("test", 5, 100) != expected[0]


def test_a_known_problem_is_unchanged() -> None:
    """If this changes, the corpus has changed, and published checkpoints and results have to be made again."""
    made = problem("train", 1, 0)
    assert made.question == (
        "Lena has 264 stickers. Lena makes 6 equal parts and keeps one. Mia brings 9 bags of 11 stickers. "
        "Finn has 38 hats. How many stickers does she have in the end?"
    )
    assert made.worked == "264 / 6 = 44\n9 * 11 = 99\n44 + 99 = 143\n#### 143"


def test_every_step_is_true_and_uses_only_known_numbers() -> None:
    for made in problems("train", 3, 1500):
        known = {int(number) for number in re.findall(r"\d+", made.question)}
        for step in made.steps:
            left, op, right, equals, result = step.split()
            assert equals == "="
            assert {int(left), int(right)} <= known, made
            assert OPERATIONS[op](int(left), int(right)) == int(result), made
            assert 1 <= int(result) <= MAX_RESULT, made
            known.add(int(result))
        assert made.answer == int(result)
        assert MIN_STEPS <= len(made.steps) <= MAX_STEPS


def test_no_question_is_in_both_splits_whatever_the_seed() -> None:
    train = {made.question.lower() for seed in (0, 1) for made in problems("train", seed, 800)}
    test = {made.question.lower() for seed in (0, 1) for made in problems("test", seed, 300)}
    assert len(train) > 1_590
    assert len(test) > 590
    assert not train & test


def test_every_opening_and_event_is_drawn_and_filled() -> None:
    made = list(problems("train", 4, 1500))
    assert {one.kind for one in made} == {part.name for part in OPENINGS}
    assert not [one for one in made if "{" in one.question]
    text = " ".join(one.question for one in made)
    for part in EVENTS:
        for phrasing in part.phrasings:
            pattern = re.sub(r"\\{(\w+)\\}", r"\\w+", re.escape(phrasing))
            assert re.search(pattern, text), phrasing


@pytest.mark.parametrize("part", [*OPENINGS, *EVENTS], ids=lambda part: part.name)
def test_each_phrasing_states_each_number_once(part) -> None:
    for phrasing in part.phrasings:
        fields = [field for _, field, _, _ in string.Formatter().parse(phrasing) if field]
        assert sorted(field for field in fields if field in part.numbers) == sorted(part.numbers)


def test_the_rows_of_a_task_are_distinct_and_from_its_split() -> None:
    made = list(rows("test"))
    assert len({row["question"] for row in made}) == len(made) == TASK_ROWS["test"]
    assert {split_of(row["question"]) for row in made} == {"test"}


def test_worked_and_direct_answers_pass_the_project_grader_and_others_fail() -> None:
    assert get_task("arith_chain").prompt_template == "{question}"
    for made in problems("test", 0, 20):
        assert grade("arith_chain", made.worked, str(made.answer)).correct
        assert grade("arith_chain", made.direct, str(made.answer)).correct
        assert not grade("arith_chain", f"{made.worked}0", str(made.answer)).correct


def test_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'dev'"):
        problem("dev", 0, 0)
