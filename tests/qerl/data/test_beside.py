"""Columns beside a question or messages that belong to what is asked, for RL and SFT alike."""

import pytest

from qerl.config.recipe import load_recipe
from qerl.data.conversations import Source, load_conversations
from qerl.data.examples import load_examples
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


def learned(tmp_path, *rows, overrides=()):
    config = load_recipe("sft_tiny", ["data.task=own", "data.limit=null", *overrides])
    source = Source(str(write_jsonl(tmp_path / "rows.jsonl", rows)), "train", None)
    return load_conversations(config.data, get_task("own"), source, None)


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


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_half_a_character_is_no_text_to_learn(tmp_path, caplog, column):
    assert len(learned(tmp_path, FORMS[0], {**FORMS[0], column: "a\ud800"})) == 1
    assert "half a character" in caplog.text


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
