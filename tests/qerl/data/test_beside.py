"""Columns beside a question or messages that belong to what is asked, for RL and SFT alike."""

import pytest

from qerl.base.errors import DataError
from qerl.checkpoint.load import load_tokenizer
from qerl.config.recipe import load_recipe
from qerl.data.conversations import Source, load_conversations
from qerl.data.examples import load_examples
from qerl.data.guess import guess
from qerl.data.sequences import tokens_of
from qerl.data.tasks import get_task, messages_of
from tests.helpers.row_files import write_jsonl

ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FORMS = [
    {"prompt": "q", "completion": "a", "answer": "a"},
    {"question": "q", "answer": "a"},
    {"instruction": "q", "output": "a"},
    {"messages": [ASK, SAY]},
    {"prompt": [ASK], "completion": [SAY], "answer": "a"},
    {"conversations": [{"role": None, "from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]


def asked(tmp_path, *rows):
    examples, report = load_examples("own", write_jsonl(tmp_path / "rows.jsonl", rows))
    return [messages_of("own", each) for each in examples], str(report), examples


def learned_from(path, columns=None, overrides=()):
    config = load_recipe("sft_tiny", ["data.task=own", "data.limit=null", *overrides])
    return load_conversations(config.data, get_task("own"), Source(path, "train", columns), None)


def learned(tmp_path, *rows, overrides=()):
    return learned_from(write_jsonl(tmp_path / "rows.jsonl", rows), overrides=overrides)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_column_system_is_the_system_message(tmp_path, form, column):
    wanted = [{"role": "system", "content": "Be brief."}, ASK]
    row = {**form, column: "Be brief."}
    assert asked(tmp_path, row)[0] == [wanted]
    (found,) = learned(tmp_path, row, overrides=["data.system_prompt=Be long."])
    assert list(found.messages) == [*wanted, SAY]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
@pytest.mark.parametrize("gap", [None, "", "nan", float("nan"), "\u200b"], ids=ascii)
def test_an_empty_one_says_nothing(tmp_path, form, gap):
    assert asked(tmp_path, {**form, "system": gap})[0] == [[ASK]]
    assert list(learned(tmp_path, {**form, "system": gap})[0].messages) == [ASK, SAY]


def test_rows_that_differ_in_it_alone_are_two(tmp_path):
    rows = [{**FORMS[0], "system": "Be brief."}, {**FORMS[0], "system": "Be long.", "answer": "b"}]
    assert len(asked(tmp_path, *rows)[0]) == len(learned(tmp_path, *rows)) == 2


SPOKEN = {"messages": [{"role": "system", "content": "S1"}, ASK, SAY]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**SPOKEN, "system": "S2"}, "two system messages"),
        ({**FORMS[0], "system": ["Be brief."]}, "a column system that is no text"),
        ({**FORMS[0], "prompt": str([ASK, SAY])}, "messages that are no list in JSON"),
        (
            {**FORMS[0], "prompt": '{"messages": [{"role": "user", "content": "q"}]}'},
            "messages that are no list in JSON",
        ),
        ({**FORMS[0], "prompt": '\ufeff[{"role": "user", "content": "q"}]'}, "messages that are no list in JSON"),
        ({"messages": [ASK, SAY], "tools": [{"description": "d"}]}, "a tool without a name"),
    ],
    ids=range(6),
)
def test_what_cannot_be_asked_is_left_out_and_named(tmp_path, caplog, row, reason):
    good = FORMS[3] if "messages" in row else FORMS[0]
    found, report, _ = asked(tmp_path, good, row)
    assert len(found) == len(learned(tmp_path, good, row)) == 1
    assert reason in report
    assert reason in caplog.text


def test_a_question_about_json_is_asked(tmp_path):
    text = '{"from": "Rome", "to": "Paris"}: which field has the destination?'
    assert asked(tmp_path, {"prompt": text, "answer": "to"})[0] == [[{"role": "user", "content": text}]]


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize("schema", [{"name": "f"}, {"type": "function", "function": {"name": "f"}}])
def test_schemas_have_one_form(tmp_path, column, schema):
    row = {"messages": [ASK, SAY], column: [schema]}
    wanted = ({"type": "function", "function": {"name": "f"}},)
    assert asked(tmp_path, row)[2][0].tools == learned(tmp_path, row)[0].tools == wanted


def last(*earlier, **beside):
    return {"messages": [*earlier, {**ASK, **beside}]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (last(ASK, {**SAY, "thinking": "x"}), last(ASK, {**SAY, "thinking": "y"})),
        (
            last({**ASK, "content": "ab"}, {**SAY, "content": "c"}),
            last({**ASK, "content": "a"}, {**SAY, "content": "bc"}),
        ),
        (last({**ASK, "role": "system"}), last(ASK)),
        (last(name="ann"), last(name="bob")),
    ],
    ids=["thoughts", "borders", "roles", "names"],
)
@pytest.mark.parametrize("answer", ["2", "1"])
def test_questions_that_differ_besides_the_text_are_two(tmp_path, one, other, answer):
    assert len(asked(tmp_path, {**one, "answer": "1"}, {**other, "answer": answer})[0]) == 2


def test_rows_without_an_answer_may_differ_in_what_grades_them(tmp_path):
    rows = [{"id": 1, "prompt": "Write.", "form": "haiku"}, {"id": 2, "prompt": "Write.", "form": "sonnet"}]
    assert len(asked(tmp_path, *rows)[0]) == 2
    assert len(asked(tmp_path, rows[0], {**rows[0], "id": 3})[0]) == 1


SUM = {"instruction": "Add the numbers.", "input": "3 4", "output": "7"}
PLAIN = {"instruction": "Name a colour.", "input": "", "output": "red"}
SUMS_ASKED = ["Add the numbers.\n\n3 4", "Name a colour."]
MAPPED = {"question": "instruction", "answer": "output"}


@pytest.mark.parametrize("columns", [None, MAPPED])
def test_the_input_is_asked_and_learned_from(tmp_path, columns):
    path = write_jsonl(tmp_path / "rows.jsonl", [SUM, PLAIN])
    examples, _ = load_examples("own", path, columns=columns)
    assert [(each.question, each.answer) for each in examples] == list(zip(SUMS_ASKED, ["7", "red"], strict=True))
    messages = [each.messages for each in learned_from(path, columns)]
    assert [one["content"] for one, _ in messages] == SUMS_ASKED
    assert [other["content"] for _, other in messages] == ["7", "red"]


def test_a_task_of_numbers_asks_it_too(tmp_path):
    examples, _ = load_examples("gsm8k", write_jsonl(tmp_path / "rows.jsonl", [SUM]), columns=MAPPED)
    assert [(each.question, each.answer) for each in examples] == [(SUMS_ASKED[0], "7")]


def test_two_inputs_of_one_instruction_are_two_rows(tmp_path):
    rows = [SUM, {**SUM, "input": "5 6", "output": "11"}]
    assert len(load_examples("own", write_jsonl(tmp_path / "rows.jsonl", rows))[0]) == 2


def test_a_guess_and_calibration_know_the_form(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [SUM, {**SUM, "output": "8"}])
    assert guess(path).columns == MAPPED
    tokenizer = load_tokenizer("tiny")
    assert SUMS_ASKED[0] in tokenizer.decode(tokens_of(SUM, tokenizer))


@pytest.mark.parametrize("gap", [None, float("nan"), "nan", " "], ids=repr)
def test_an_empty_input_adds_nothing(tmp_path, gap):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**SUM, "input": gap}])
    assert load_examples("own", path)[0][0].question == SUM["instruction"]
    assert learned_from(path)[0].messages[0]["content"] == SUM["instruction"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"history": [["a", "b"]]}, "its column 'history' would not be asked"),
        ({"system": {"a": 1}}, "its column 'system' is {'a': 1}"),
        ({"input": {"a": 1}}, "its column 'input' is a dict"),
    ],
)
def test_what_would_not_be_asked_is_left_out_and_named(tmp_path, more, says):
    path = write_jsonl(tmp_path / "rows.jsonl", [PLAIN, {**SUM, **more}])
    assert says in str(load_examples("own", path)[1])
    assert len(learned_from(path)) == 1
    with pytest.raises(DataError, match=says):
        learned_from(write_jsonl(tmp_path / "rows.jsonl", [{**SUM, **more}]))


def test_an_input_that_is_the_answer_is_not_asked(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [SUM])
    examples, _ = load_examples("own", path, columns={"question": "instruction", "answer": "input"})
    assert (examples[0].question, examples[0].answer) == ("Add the numbers.", "3 4")
