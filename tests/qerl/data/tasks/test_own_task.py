"""The task `own` (rows with a prompt or messages, text answers, nothing added to the prompt), and own graders."""

from dataclasses import replace

import pytest

from qerl.base.errors import ConfigError, DataError
from qerl.base.isolate import ReturnedError
from qerl.base.own_function import LateError, OwnFunctionError
from qerl.data.examples import check_answers, load_examples
from qerl.data.grading.grade import check_grader, grade, grade_many
from qerl.data.tasks import get_task, messages_of, with_grader
from tests.helpers.row_files import write_jsonl

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Name a colour."},
]


def read(tmp_path, rows, task="own", **options):
    return load_examples(task, write_jsonl(tmp_path / "rows.jsonl", rows), **options)


def grader(tmp_path, text, timeout_s=60.0, name="grader.py"):
    (tmp_path / name).write_text(text)
    return with_grader(get_task("own"), str(tmp_path / name), timeout_s)


def test_a_prompt_is_all_that_is_asked(tmp_path):
    (example,), _ = read(tmp_path, [{"prompt": "Name a colour.", "level": 3}])
    assert messages_of("own", example) == [{"role": "user", "content": "Name a colour."}]
    assert (example.answer, example.extra) == ("", {"level": 3})


def test_messages_are_asked_as_they_are(tmp_path):
    (example,), _ = read(tmp_path, [{"messages": CHAT, "answer": "red"}])
    assert messages_of("own", example) == CHAT
    assert (example.question, example.answer) == ("Name a colour.", "red")
    asked = messages_of("own", example, "Another.", "{question} One word.")
    assert asked == [*CHAT[:-1], {"role": "user", "content": "Name a colour. One word."}]
    (example,), _ = read(tmp_path, [{"messages": CHAT[1:]}])
    assert messages_of("own", example, "Be kind.")[0] == {"role": "system", "content": "Be kind."}


def test_a_last_message_of_the_assistant_is_the_answer_and_not_asked(tmp_path):
    (example,), _ = read(tmp_path, [{"messages": [*CHAT, {"role": "assistant", "content": "Blue."}]}])
    assert (messages_of("own", example), example.answer) == (CHAT, "Blue.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "its messages ask nothing: there is none of the user"),
        ([{"role": "user", "content": 3}], "its message 1 is no object with a role"),
        ([{"role": "user", "content": "\ud800"}], "its message 1 holds half a character"),
    ],
)
def test_messages_that_cannot_be_asked_are_counted_and_named(messages, reason, tmp_path):
    examples, report = read(tmp_path, [{"prompt": "a"}, {"messages": messages}])
    assert (len(examples), report.dropped) == (1, 1)
    assert reason in str(report)


@pytest.mark.parametrize("column", ["question", "prompt", "messages"])
def test_columns_are_mapped_by_any_of_their_names(column, tmp_path):
    (example,), _ = read(tmp_path, [{"instruction": "a", "out": "b"}], columns={column: "instruction", "answer": "out"})
    assert (example.question, example.answer) == ("a", "b")


def test_answers_stay_the_text_that_they_are(tmp_path):
    answers = ["Step 1: #### no", "\\boxed{3}", "x = 2 (two)"]
    examples, _ = read(tmp_path, [{"prompt": str(n), "answer": text} for n, text in enumerate(answers)])
    assert [example.answer for example in examples] == answers


def test_rows_without_an_answer_need_a_grader(tmp_path):
    examples, report = read(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    assert (len(examples), dict(report.counts)) == (1, {"no answer": 1})
    own = grader(tmp_path, "def grade(completion): return True")
    examples, _ = read(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b"}], own)
    assert [example.answer for example in examples] == ["1", ""]
    examples, _ = read(tmp_path, [{"prompt": "a"}])
    check_answers(own, examples)
    with pytest.raises(DataError, match=r"1 of 1 rows have no answer .*--columns answer=NAME.*--grader"):
        check_answers(get_task("own"), examples)


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [
        ("Paris", "paris", True),
        ("I think so.\n\nParis.", "Paris", True),
        ("It is in France, so the answer is **Paris**.", "Paris", True),
        ("The answer is Paris. It is large.", "Paris", True),
        ("<answer>Paris,  France</answer>", "Paris, France", True),
        ("\\boxed{Paris}", "Paris", True),
        ("1,800", "1800", True),
        ("a\nb", "a\n b", True),
        ("<think>London?</think> Paris", "Paris", True),
        ("<think>Paris</think> London", "Paris", False),
        ("London or Paris", "Paris", False),
        ("The answer is not London. Paris", "London", False),
        ("Answer: Paris\nAnswer: London", "Paris", False),
        ("\\boxed{London} Paris", "Paris", False),
        ("", "Paris", False),
        ("18", "19", False),
        ("Pari", "Paris", False),
    ],
)
def test_a_text_is_right_if_it_is_what_the_completion_states(completion, answer, correct):
    assert grade("own", completion, answer).correct is correct


def test_a_grader_judges_one_completion_with_the_columns_of_its_row(tmp_path):
    task = grader(tmp_path, "def grade(completion, answer, level=0):\n    return (answer in completion) * level / 4\n")
    columns = {"level": [4, 1, 2], "prompts": ["p"] * 3, "step": 7}
    grades = grade_many(task, ["a b", "b", "c"], ["a", "b", "x"], columns=columns)
    assert [(g.correct, g.reason, g.value) for g in grades] == [
        (True, "correct", 1.0), (False, "wrong", 0.25), (False, "wrong", 0.0),
    ]  # fmt: skip
    assert grade_many(task, [], []) == []


@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_grader_may_take_lists_and_be_async(start, tmp_path):
    text = f"{start} mine(completions, answer, **columns):\n    return [c == a for c, a in zip(completions, answer)]\n"
    task = grader(tmp_path, text)
    task = replace(task, grader=f"{task.grader}:mine")
    assert [g.correct for g in grade_many(task, ["a", "b"], ["a", "a"])] == [True, False]


@pytest.mark.parametrize(
    ("body", "error", "message", "index"),
    [
        ("return 3", ReturnedError, "returned 3.0, and a grade is a number from 0", 0),
        ("return None if completion == 'b' else 1", ReturnedError, "returned None, and a grade is a number from 0", 1),
        ("return 1 / (completion != 'b')", OwnFunctionError, "raised ZeroDivisionError", 1),
        ("import os; os._exit(3)", OwnFunctionError, "ended its process", None),
        ("import time; time.sleep(60)", LateError, "did not return within 1 s", None),
    ],
)
def test_a_grader_that_fails_says_where(body, error, message, index, tmp_path):
    task = grader(tmp_path, f"def grade(completion):\n    {body}\n", timeout_s=1)
    with pytest.raises(error, match=message) as raised:
        grade_many(task, ["a", "b"], ["", ""])
    assert raised.value.index == index


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.py", "grader file 'no.py' does not exist here"),
        ("grader.py:grader", r"grader 'grader.py:grader': grader.py has no function 'grader'; did you mean 'grade'\?"),
        ("torn.py", "grader file 'torn.py' cannot be imported: SyntaxError"),
        ("grader", "grader 'grader' names no function: write path/to/file.py"),
    ],
)
def test_a_grader_that_is_not_there_is_refused_by_name(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grader(tmp_path, "def grade(completion): return 1")
    grader(tmp_path, "def grade(", name="torn.py")
    with pytest.raises(ConfigError, match=message):
        check_grader(with_grader(get_task("own"), name, 60.0))


def test_a_grader_that_asks_for_a_column_that_is_not_there_is_refused(tmp_path):
    task = grader(tmp_path, "def grade(completion, lvl): return 1")
    examples, _ = read(tmp_path, [{"prompt": "a", "level": 1}], task)
    named = r"asks for 'lvl', which is neither .* did you mean 'level'\? .* step, level, log_metric"
    with pytest.raises(ConfigError, match=named):
        check_grader(task, examples)
