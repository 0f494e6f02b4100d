"""scripts/study/real_task.py: rows whose answers are right, splits that share no question, the grading."""

import json
import re

import pytest
import real_task


@pytest.fixture(scope="module", params=["plain", "sparse"])
def rows(request):
    return real_task.rows(request.param, {"train": 400, "validation": 60, "test": 80})


def solved(question):
    """The answer by the words of a question, independent of the code that made it; None for a story not listed here."""
    n = [int(number) for number in re.findall(r"\d+", question)]
    for words, answer in (
        ("gets # more and gives", lambda: n[0] + n[1] - n[2]),
        ("more on the table", lambda: n[0] * n[1] + n[2]),
        ("boxes with # .* and sells", lambda: n[0] * n[1] - n[2]),
        ("has # more than", lambda: n[0] + n[0] + n[1]),
        ("times as many", lambda: n[1] + n[0] * n[1]),
        ("lost # and then found", lambda: (n[0] - n[1]) * n[2]),
        ("gets # more|together|tomorrow", lambda: n[0] + n[1]),
        ("gives # of them|takes out|How many more", lambda: n[0] - n[1]),
        ("boxes with|costs", lambda: n[0] * n[1]),
        ("shares|bags of", lambda: n[0] // n[1]),
    ):
        if re.search(words, re.sub(r"\d+", "#", question)):
            return answer()
    return None


def test_every_answer_is_right(rows):
    of_all = [row for split in rows.values() for row in split]
    assert {row["question"]: row["answer"] for row in of_all} == {
        row["question"]: str(solved(row["question"])) for row in of_all
    }


def test_the_splits_share_no_question(rows):
    questions = {split: {row["question"] for row in of_split} for split, of_split in rows.items()}
    assert {split: len(found) for split, found in questions.items()} == {"train": 400, "validation": 60, "test": 80}
    assert not questions["train"] & questions["validation"]
    assert not (questions["train"] | questions["validation"]) & questions["test"]


def test_rows_are_the_same_each_time_and_hold_all_stories():
    counts = {"train": 600, "validation": 5, "test": 5}
    once, again = real_task.rows("plain", counts), real_task.rows("plain", counts)
    assert once == again
    steps = [len(re.findall(r"\d+", row["question"])) for row in once["train"]]
    assert 0.8 < steps.count(2) / len(steps) < 0.97  # the problems in one step
    text = " ".join(row["question"] for row in once["train"])
    for story, _ in (*real_task.ONE_STEP, *real_task.TWO_STEPS):
        longest = max(re.split(r"{\w+}", story), key=len)
        assert longest in text


def test_numbers_of_the_sparse_variant_are_larger_and_take_two_steps():
    means = {}
    for variant in ("plain", "sparse"):
        rows = real_task.rows(variant, {"train": 200, "validation": 5, "test": 5})["train"]
        means[variant] = sum(int(row["answer"]) for row in rows) / len(rows)
    assert means["sparse"] > 1.1 * means["plain"]
    assert sum(len(re.findall(r"\d+", row["question"])) > 2 for row in rows) > 100  # two stories have two numbers


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("5 + 7 = 12", "12", True),
        ("So it is 12.", "12", True),
        ("12.0", "12", True),
        ("They have 1,234 books.", "1234", True),
        ("5 + 7 = 12 apples in 2 boxes", "12", False),
        ("#### 12\nThe answer is: 12", "12", True),
        ("19", "18", False),
        ("120", "12", False),
        ("twelve", "12", False),
        ("", "12", False),
        ("15 - 12", "12", True),  # the sign of a difference is no sign of a number
        ("it is -12", "12", False),
        ("x=12", "12", True),
        ("9 9", "99", False),
    ],
)
def test_the_last_number_is_graded(completion, answer, right):
    assert real_task.grade(completion, answer) is right


def test_qerl_reads_the_rows_and_asks_the_question_alone(tmp_path):
    from qerl.data.examples import load_examples
    from qerl.data.tasks import messages_of

    file = real_task.write(tmp_path, "plain", {"train": 20, "validation": 5, "test": 5})["test"]
    examples, report = load_examples("own", str(file))
    given = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(example.question, example.answer) for example in examples] == [
        (row["question"], row["answer"]) for row in given
    ]
    assert not report.counts
    assert messages_of("own", examples[0]) == [{"role": "user", "content": given[0]["question"]}]
