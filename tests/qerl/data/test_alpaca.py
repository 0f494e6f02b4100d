"""Alpaca's three columns: what a row asks goes on in its input, in RL, SFT, calibration and guesses alike."""

import pytest

from qerl.base.errors import DataError
from qerl.checkpoint.load import load_tokenizer
from qerl.config.recipe import load_recipe
from qerl.data.conversations import Source, load_conversations
from qerl.data.examples import load_examples
from qerl.data.guess import guess
from qerl.data.sequences import tokens_of
from qerl.data.tasks import get_task
from tests.helpers.row_files import write_jsonl

ROW = {"instruction": "Add the numbers.", "input": "3 4", "output": "7"}
PLAIN = {"instruction": "Name a colour.", "input": "", "output": "red"}
ASKED = ["Add the numbers.\n\n3 4", "Name a colour."]
MAPPED = {"question": "instruction", "answer": "output"}


def learned(path, columns=None):
    config = load_recipe("sft_tiny", ["data.task=own", "data.limit=null"])
    return load_conversations(config.data, get_task("own"), Source(path, "train", columns), None)


@pytest.mark.parametrize("columns", [None, MAPPED])
def test_the_input_is_asked_and_learned_from(tmp_path, columns):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW, PLAIN])
    examples, _ = load_examples("own", path, columns=columns)
    assert [(each.question, each.answer) for each in examples] == list(zip(ASKED, ["7", "red"], strict=True))
    messages = [each.messages for each in learned(path, columns)]
    assert [one["content"] for one, _ in messages] == ASKED
    assert [other["content"] for _, other in messages] == ["7", "red"]


def test_a_task_of_numbers_asks_it_too(tmp_path):
    examples, _ = load_examples("gsm8k", write_jsonl(tmp_path / "rows.jsonl", [ROW]), columns=MAPPED)
    assert [(each.question, each.answer) for each in examples] == [(ASKED[0], "7")]


def test_two_inputs_of_one_instruction_are_two_rows(tmp_path):
    rows = [ROW, {**ROW, "input": "5 6", "output": "11"}]
    assert len(load_examples("own", write_jsonl(tmp_path / "rows.jsonl", rows))[0]) == 2


def test_a_guess_and_calibration_know_the_form(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW, {**ROW, "output": "8"}])
    assert guess(path).columns == MAPPED
    tokenizer = load_tokenizer("tiny")
    assert ASKED[0] in tokenizer.decode(tokens_of(ROW, tokenizer))


@pytest.mark.parametrize("gap", [None, float("nan"), "nan", " "], ids=repr)
def test_an_empty_input_adds_nothing(tmp_path, gap):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, "input": gap}])
    assert load_examples("own", path)[0][0].question == ROW["instruction"]
    assert learned(path)[0].messages[0]["content"] == ROW["instruction"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"history": [["a", "b"]]}, "its column 'history' would not be asked"),
        ({"system": {"a": 1}}, "its column 'system' is {'a': 1}"),
        ({"input": {"a": 1}}, "its column 'input' is a dict"),
    ],
)
def test_what_would_not_be_asked_is_left_out_and_named(tmp_path, more, says):
    path = write_jsonl(tmp_path / "rows.jsonl", [PLAIN, {**ROW, **more}])
    assert says in str(load_examples("own", path)[1])
    assert len(learned(path)) == 1
    with pytest.raises(DataError, match=says):
        learned(write_jsonl(tmp_path / "rows.jsonl", [{**ROW, **more}]))


def test_an_input_that_is_the_answer_is_not_asked(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW])
    examples, _ = load_examples("own", path, columns={"question": "instruction", "answer": "input"})
    assert (examples[0].question, examples[0].answer) == ("Add the numbers.", "3 4")
