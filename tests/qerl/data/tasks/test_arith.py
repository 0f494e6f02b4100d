"""The rows of the task arith: splits share none, every step is true, and the grader takes worked and direct answers."""

import itertools
import string

import pytest

from qerl.base.errors import DataError
from qerl.data.grading.grade import grade
from qerl.data.tasks import get_task
from qerl.data.tasks.arith import rows, solved
from qerl.data.tasks.word_game import split_of

COUNT = {"train": 8192, "test": 1024}
LARGEST = 99


def test_a_known_problem_is_unchanged() -> None:
    made, plain = next(solved("train")), next(rows("train"))
    assert (
        made["question"]
        == plain["question"]
        == (
            "Hugo has 10 lemons. Mia has 5 more than Hugo, and Ivy has 2 times as many as Hugo. "
            "How many lemons do Mia and Ivy have together?"
        )
    )
    assert made["answer"] == "10 + 5 = 15\n10 * 2 = 20\n15 + 20 = 35\n#### 35"
    assert (plain["answer"], plain["kind"]) == ("35", "three_friends")


def test_a_tenth_of_all_questions_is_in_the_test_split() -> None:
    drawn = [f"{word} has {number} pens" for word in string.ascii_letters for number in range(200)]
    share = sum(split_of(question) == "test" for question in drawn) / len(drawn)
    assert share == pytest.approx(0.1, abs=0.012)  # four standard deviations of 10,400 draws


def test_case_and_spaces_do_not_move_a_question_to_the_other_split() -> None:
    question = next(rows("test"))["question"]
    assert split_of("  " + question.upper().replace(" ", "\n ")) == "test"


@pytest.mark.parametrize("split", COUNT)
def test_the_rows_of_a_task_are_distinct_and_from_its_split(split) -> None:
    made = list(rows(split))
    assert len({row["question"] for row in made}) == len(made) == COUNT[split]
    assert {split_of(row["question"]) for row in made} == {split}
    assert not [row for row in made if "{" in row["question"]]


@pytest.mark.parametrize("split", COUNT)
def test_every_step_is_true_and_uses_only_known_numbers(split) -> None:
    for made, plain in zip(solved(split), rows(split), strict=True):
        *steps, last = made["answer"].splitlines()
        known = {int(word.strip(".,?")) for word in made["question"].split() if word.strip(".,?").isdigit()}
        for step in steps:
            left, op, right, equals, result = step.split()
            assert equals == "="
            assert {int(left), int(right)} <= known, made
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](int(left), int(right))
            assert value == int(result), made
            assert 1 <= value <= LARGEST, made
            known.add(value)
        assert last == f"#### {value}"
        assert plain["answer"] == str(value)
        assert 2 <= len(steps) <= 4


def test_worked_and_direct_answers_pass_the_project_grader_and_others_fail() -> None:
    assert get_task("arith").prompt_template == "{question}"
    for made, row in itertools.islice(zip(solved("test"), rows("test"), strict=True), 20):
        worked, answer = made["answer"], row["answer"]
        assert grade("arith", worked, answer).correct
        assert grade("arith", f"#### {answer}", answer).correct
        assert not grade("arith", f"{worked}0", answer).correct
        assert not grade("arith", worked.rpartition("####")[0], answer).correct


def test_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'dev': write 'train' or 'test'"):
        next(rows("dev"))
