"""The task arith and its stories (scripts/models/stories.py): reproducible, splits share none, solutions are right."""

import itertools
import string

import pytest
from stories import KINDS, MAX_RESULT, TASK_ROWS, problem, problems, row, task_problems

from qerl.base.errors import DataError
from qerl.data.grading.grade import grade
from qerl.data.tasks import get_task
from qerl.data.tasks.arith import rows, solved
from qerl.data.tasks.word_game import split_of


def test_a_problem_depends_only_on_split_seed_and_index() -> None:
    expected = list(problems("train", 5, 20, start=100))
    assert [problem("train", 5, index) for index in reversed(range(100, 120))] == expected[::-1]
    assert problem("train", 6, 100) != expected[0]
    assert problem("test", 5, 100) != expected[0]


def test_a_known_problem_is_unchanged() -> None:
    """If this changes, the corpus has changed, and the embedded model has to be trained again."""
    made = problem("train", 0, 0)
    assert made.question == (
        "Hugo has 10 lemons. Mia has 5 more than Hugo, and Ivy has 2 times as many as Hugo. "
        "How many lemons do Mia and Ivy have together?"
    )
    assert made.worked == "10 + 5 = 15\n10 * 2 = 20\n15 + 20 = 35\n#### 35"
    assert (made.direct, made.answer, made.kind) == ("#### 35", 35, "three_friends")


def test_no_question_is_in_both_splits_whatever_the_seed() -> None:
    train = {made.question.lower() for seed in (0, 1, 2) for made in problems("train", seed, 2000)}
    test = {made.question.lower() for seed in (0, 1, 2) for made in problems("test", seed, 700)}
    assert len(train) > 5_900
    assert len(test) > 2_000
    assert not train & test


def test_a_tenth_of_all_questions_is_in_the_test_split() -> None:
    drawn = [f"{word} has {number} pens" for word in string.ascii_letters for number in range(200)]
    share = sum(split_of(question) == "test" for question in drawn) / len(drawn)
    assert share == pytest.approx(0.1, abs=0.012)  # four standard deviations of 10,400 draws


def test_case_and_spaces_do_not_move_a_question_to_the_other_split() -> None:
    question = problem("test", 0, 3).question
    assert split_of("  " + question.upper().replace(" ", "\n ")) == "test"


def test_every_step_is_true_and_uses_only_known_numbers() -> None:
    for made in problems("train", 3, 3000):
        known = {int(word.strip(".,?")) for word in made.question.split() if word.strip(".,?").isdigit()}
        for step in made.steps:
            left, op, right, equals, result = step.split()
            assert equals == "="
            assert {int(left), int(right)} <= known, made
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](int(left), int(right))
            assert value == int(result), made
            assert 1 <= value <= MAX_RESULT, made
            known.add(value)
        assert made.answer == value
        assert 2 <= len(made.steps) <= 4


def test_every_kind_and_phrasing_is_drawn_and_filled() -> None:
    made = list(problems("train", 4, 4000))
    assert {one.kind for one in made} == {kind.name for kind in KINDS}
    assert not [one for one in made if "{" in one.question]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_phrasing_states_each_number_once(kind) -> None:
    for phrasing in kind.phrasings:
        fields = [field for _, field, _, _ in string.Formatter().parse(phrasing) if field]
        assert sorted(field for field in fields if field in kind.numbers) == sorted(kind.numbers)


def test_a_phrasing_that_swaps_two_numbers_is_wrong_by_its_steps() -> None:
    """The text describes the steps: one problem of each kind is computed by hand from its text."""
    examples = {
        "pages_left": (90 - 7 * 5, "A book has 90 pages. {A} reads 7 pages a day for 5 days. How many pages are left?"),
        "change": (
            50 - (3 * 4 + 9),
            "{A} has 50 dollars. {She} buys 3 pens for 4 dollars each and a bag for 9 dollars. "
            "How many dollars does {A} have left?",
        ),
        "rows": (
            6 * 8 - 4 * 3,
            "A room has 6 rows of 8 chairs. {A} carries out 4 chairs at a time and goes 3 times. "
            "How many chairs are left?",
        ),
    }
    numbers = {
        "pages_left": {"a": 90, "b": 7, "c": 5},
        "change": {"a": 3, "b": 4, "c": 9, "d": 50},
        "rows": {"a": 6, "b": 8, "c": 4, "d": 3},
    }
    for kind in (kind for kind in KINDS if kind.name in examples):
        answer, text = examples[kind.name]
        values = dict(numbers[kind.name])
        words = {"A": "{A}", "She": "{She}", "things": "pens"}
        assert kind.phrasings[0].format(**values, **words) == text
        for position, step in enumerate(kind.steps, start=1):
            left, op, right = step.split()
            x, y = values[left], values[right]
            values[str(position)] = {"+": x + y, "-": x - y, "*": x * y}[op]
        assert values[str(len(kind.steps))] == answer


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_rows_that_ship_are_the_stories(split) -> None:
    first = [row(each) for each in itertools.islice(task_problems(split), 100)]
    made = list(itertools.islice(solved(split), 100))
    assert [(each["id"], each["question"], each["answer"]) for each in made] == [
        (each["id"], each["question"], each["worked"]) for each in first
    ]
    shipped = list(itertools.islice(rows(split), 100))
    assert [each["kind"] for each in shipped] == [each["kind"] for each in first]
    assert [f"#### {each['answer']}" for each in shipped] == [each["worked"].splitlines()[-1] for each in first]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_rows_of_a_task_are_distinct_and_from_its_split(split) -> None:
    made = list(rows(split))
    assert len({row["question"] for row in made}) == len(made) == TASK_ROWS[split]
    assert {split_of(row["question"]) for row in made} == {split}


def test_worked_and_direct_answers_pass_the_project_grader_and_others_fail() -> None:
    assert get_task("arith").prompt_template == "{question}"
    for made in problems("test", 0, 20):
        assert grade("arith", made.worked, str(made.answer)).correct
        assert grade("arith", made.direct, str(made.answer)).correct
        assert not grade("arith", f"{made.worked}0", str(made.answer)).correct
        assert not grade("arith", "\n".join(made.steps[:-1]), str(made.answer)).correct


def test_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'dev': write 'train' or 'test'"):
        next(rows("dev"))
