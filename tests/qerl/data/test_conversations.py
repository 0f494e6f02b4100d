"""Rows of conversations: the forms that are read, and what is left out or refused, in one line."""

import pytest

from qerl.base.errors import DataError
from qerl.config.recipe import load_recipe
from qerl.data.conversations import Source, load_conversations
from qerl.data.examples import load_examples
from qerl.data.tasks import get_task, messages_of
from tests.helpers.row_files import write_jsonl

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}


def read(path, rows, *overrides, columns=None, limit=None, task="own"):
    config = load_recipe("sft_tiny", [f"data.task={task}", "data.limit=null", *overrides])
    source = Source(str(write_jsonl(path / "rows.jsonl", rows)), "train", columns)
    return load_conversations(config.data, get_task(task), source, limit)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [ASKED, SAID]}, None),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, SAID]}, None),
        ({"prompt": "hi", "completion": "hello"}, None),
        ({"prompt": [ASKED], "completion": [SAID]}, None),
        ({"question": "hi", "answer": "hello"}, None),
        ({"instruction": "hi", "output": "hello"}, {"question": "instruction", "answer": "output"}),
        ({"chat": [ASKED, SAID]}, {"question": "chat"}),
        ({"messages": '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]'}, None),
    ],
)
def test_the_forms_of_a_row(tmp_path, row, columns):
    (found,) = read(tmp_path, [row], columns=columns)
    assert found.messages == (ASKED, SAID)


WRONG = {"role": "assistant", "content": "it is 1000"}
TALK = [ASKED, WRONG, ASKED, SAID]


def flagged(**flags):
    return {"messages": [ASKED, {**WRONG, **flags}, ASKED, SAID]}


NOT = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss": 0}]
YET = [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"loss": None}, {"weight": float("nan")}, {"mask": None}]


@pytest.mark.parametrize(("flags", "learned"), [*((each, [3]) for each in NOT), *((each, [1, 3]) for each in YET)])
def test_a_message_may_say_whether_it_is_learned(tmp_path, flags, learned):
    (found,) = read(tmp_path, [flagged(**flags)])
    assert (list(found.messages), found.answers) == (TALK, learned)


@pytest.mark.parametrize(
    "flags",
    [
        *({"weight": 0.5}, {"weight": "0"}, {"weight": -1}, {"train": "no"}, {"loss": [0, 1]}, {"loss_mask": 0}),
        *({"mask": True}, {"train_detail": [{"begin_offset": 0}]}, {"loss_weight": 1.0}),
    ],
)
def test_a_row_that_does_not_say_clearly_what_is_learned_is_left_out_and_named(tmp_path, caplog, flags):
    with caplog.at_level("WARNING"):
        assert len(read(tmp_path, [{"messages": [ASKED, SAID]}, flagged(**flags)])) == 1
    assert "does not say clearly whether it is learned (1); for example row 2: its message 2 has" in caplog.text


def test_only_the_assistant_is_learned(tmp_path, caplog):
    """OpenAI's weight of 1 on a question asks for nothing; `train` does."""
    rows = [{"messages": [{**ASKED, "weight": 1}, SAID]}, {"messages": [{**ASKED, "train": True}, SAID]}]
    with caplog.at_level("WARNING"):
        assert len(read(tmp_path, rows)) == 1
    assert "row 2: its message 1 has 'train' and the role 'user'" in caplog.text
    with pytest.raises(DataError, match="no message that is learned"):
        read(tmp_path, [{"messages": [ASKED, {**SAID, "weight": 0}]}])


def test_rows_that_differ_in_what_is_learned_alone_are_two(tmp_path):
    assert len(read(tmp_path, [flagged(weight=0), flagged(weight=1)])) == 2


def test_a_completion_says_so_too(tmp_path):
    after = [{**WRONG, "weight": 0}, ASKED, SAID]
    (found,) = read(tmp_path, [{"prompt": [ASKED], "completion": after}])
    assert found.answers == [3]


@pytest.mark.parametrize(
    "call",
    [
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "assistant", "content": float("nan"), "tool_calls": '[{"name": "add", "arguments": {"a": 1}}]'},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}]},
    ],
    ids=["sharegpt", "function_call", "text", "parquet"],
)
def test_calls_in_each_form_are_the_same(tmp_path, call):
    (found,) = read(tmp_path, [{"messages": [ASKED, call, SAID]}])
    expected = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}


def test_tools_and_their_calls_reach_the_template(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    spoken = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "content": "2", "tool_call_id": "1"}
    (found,) = read(tmp_path, [{"messages": [ASKED, spoken, answer, SAID], "tools": [{"name": "add"}]}])
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.messages[2] == answer
    assert found.tools == ({"type": "function", "function": {"name": "add"}},)


def test_a_system_prompt_is_given_to_conversations_without_one(tmp_path):
    own = {"role": "system", "content": "mine"}
    rows = [{"messages": [ASKED, SAID]}, {"messages": [own, ASKED, SAID]}]
    first, second = read(tmp_path, rows, "data.system_prompt=yours")
    assert (first.messages[0]["content"], second.messages[0]["content"]) == ("yours", "mine")


def test_the_column_system_of_sharegpt_is_the_system_message(tmp_path):
    talk = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "mine"}
    (found,) = read(tmp_path, [talk], "data.system_prompt=yours")
    assert found.messages == ({"role": "system", "content": "mine"}, ASKED, SAID)
    (example,), _ = load_examples("own", write_jsonl(tmp_path / "rows.jsonl", [talk]))
    assert messages_of("own", example, "yours") == [{"role": "system", "content": "mine"}, ASKED]
    assert example.answer == "hello"
    own = {"messages": [{"role": "system", "content": "first"}, ASKED, SAID], "system": float("nan")}
    (found,) = read(tmp_path, [own])
    assert found.messages[0]["content"] == "first"


BAD = {
    "no message of the assistant": {"messages": [ASKED]},
    "a message without a role": {"messages": [{"content": "hi"}, SAID]},
    "a message without a text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]},
    "no list of messages": {"messages": "hi"},
    "a tool call without a name": {"messages": [ASKED, {**SAID, "tool_calls": [{"function": {}}]}]},
    "tools that are no list of schemas": {"messages": [ASKED, SAID], "tools": "3"},
    "an empty message of the assistant": {"messages": [ASKED, {**SAID, "content": " \n"}]},
    "half a character": {"messages": [ASKED, {**SAID, "content": "\ud83d"}]},
    "no readable row": "text",
}


@pytest.mark.parametrize("reason", BAD)
def test_a_row_that_cannot_be_learned_is_left_out_with_its_reason(tmp_path, caplog, reason):
    good = {"messages": [ASKED, SAID]}
    with caplog.at_level("WARNING"):
        assert len(read(tmp_path, [good, BAD[reason], good])) == 1
    assert f"{reason} (1)" in caplog.text
    assert "the same as an earlier row (1)" in caplog.text
    assert "; for example row 2: " in caplog.text


@pytest.mark.parametrize("gap", [None, float("nan"), "nan", "", []], ids=repr)
def test_a_gap_in_a_column_of_tools_or_names_says_nothing(tmp_path, gap):
    (found,) = read(tmp_path, [{"messages": [ASKED, {**SAID, "tool_calls": gap}], "tools": gap, "id": gap}])
    assert (found.id, found.tools, found.messages) == ("1", (), (ASKED, SAID))


def test_rows_without_anything_to_learn_are_refused_in_one_line(tmp_path):
    says = r"can be learned from: 0 of 1 rows.*no message of the assistant"
    with pytest.raises(DataError, match=says) as error:
        read(tmp_path, [{"messages": [ASKED]}])
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"has no column of conversations \(its columns: text\): give `messages`"):
        read(tmp_path, [{"text": "hi"}])


def test_the_solutions_of_a_task_are_its_rows_worked_out():
    config = load_recipe("sft_tiny")
    (found,) = load_conversations(config.data, get_task("arith"), Source(None, "train", None), 1)
    row = next(iter(get_task("arith").generate("train")))
    assert found.messages[0] == {"role": "user", "content": row["question"]}
    assert found.messages[1]["content"].endswith(f"\n#### {row['answer']}")
