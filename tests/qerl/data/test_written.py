"""What a chat template does not write of a row is noticed, and what it writes in its own way is not."""

import pytest

from qerl.base.errors import DataError
from qerl.base.sandbox import render_text
from qerl.checkpoint.load import load_tokenizer
from qerl.data.examples import load_examples
from qerl.data.messages import Written, read_message
from qerl.data.sequences import Renderer
from qerl.data.tasks import messages_of
from tests.helpers.row_files import write_jsonl, write_parquet

END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# As Qwen2.5's without tools: a role that it does not know is passed over.
KNOWN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endif %}{% endfor %}" + END
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + END
)
# As Qwen3's: thoughts of the last answer alone.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set said = m.content.split('</think>')[-1] %}"
    "{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] "
    "if '</think>' in m.content else '') %}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ said.lstrip('\n') + '<|im_end|>\n' }}{% endfor %}" + END
)
USER, ASSISTANT = {"role": "user", "content": "What is 5 plus 4?"}, {"role": "assistant", "content": "9"}
LAST = {"role": "user", "content": "So what is it?"}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": 'a "quoted"\nüber'}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def tokenizer_with(template):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    return tokenizer


def missing(template, messages, tools=(), learned=()):
    tokenizer, messages = tokenizer_with(template), [read_message(each, 1) for each in messages]
    prompt = messages[-1]["role"] != "assistant"
    return Written(tokenizer).missing(render_text(tokenizer, messages, prompt, tools), messages, tools, learned)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "says"),
    [
        (KNOWN, [{"role": "developer", "content": "Be short."}, USER], (), "a message of the role developer"),
        (KNOWN, [USER, ASSISTANT, {"role": "tool", "content": "9"}, LAST], (), "a message of the role tool"),
        (KNOWN, [USER, CALLS, LAST], (), "a tool call"),
        (KNOWN, [USER], (SCHEMA,), "the row's tools"),
        (KNOWN, [USER, {**ASSISTANT, "reasoning_content": "5 and 4"}, LAST], (), "'reasoning_content' of a message"),
        (KNOWN, [USER, {**ASSISTANT, "thinking": "5 and 4"}, LAST], (), "'thinking' of a message"),
        (THINKING, [USER, {**ASSISTANT, "thinking": "5 and 4"}, LAST], (), "'thinking' of a message"),
        (KNOWN, [{**USER, "name": "ann"}], (), "the name in a message of the role user"),
        (KNOWN, [{**USER, "name": "ann"}, {**ASSISTANT, "name": "bob"}, LAST], (), "the name in a message of the role"),
        ("{{ messages[-1].content }}", [{"role": "system", "content": "It is."}, USER], (), "of the role system"),
        ("{{ messages[0].content }}", [USER, ASSISTANT, dict(USER)], (), "of the role user"),
    ],
)
def test_what_is_not_written_is_named(template, messages, tools, says):
    assert says in missing(template, messages, tools)


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (TOOLS, [USER, CALLS, {"role": "tool", "content": "9"}, LAST], (SCHEMA,)),
        (TOOLS.replace("m.content", "(m.content | tojson)"), [USER, CALLS, {"role": "tool", "content": '"a"\nb'}, LAST],
         ()),
        (TOOLS, [USER, CALLS, {"role": "tool", "content": "9", "name": "add"}, LAST], (SCHEMA,)),
        (KNOWN.replace("m.role +", "(m.name or m.role) +"), [{**USER, "name": "ann"}], ()),
        (TOOLS, [{"role": "developer", "content": " Be short.\n"}, USER], ()),
        (KNOWN, [{"role": "system", "content": "\n two  spaces \n"}, USER], ()),
        (KNOWN, [USER, {"role": "assistant", "content": "<think>5 and 4</think>9"}, LAST], ()),
        (THINKING, [USER, {**ASSISTANT, "reasoning_content": "5 and 4"}, LAST], ()),
        (THINKING, [USER, {"role": "assistant", "content": "<think>5 and 4</think>9"}, LAST], ()),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", [USER, ASSISTANT, LAST], ()),
    ],
)  # fmt: skip
def test_what_is_written_in_any_place_and_form_is_found(template, messages, tools):
    assert missing(template, messages, tools) is None


def test_thoughts_that_are_learned_have_to_be_there():
    thought = {**ASSISTANT, "reasoning_content": "5 and 4"}
    assert missing(THINKING, [USER, thought], learned=[1]) is None
    assert missing(THINKING, [USER, {**ASSISTANT, "content": "<think>5 and 4</think>9"}], learned=[1]) is None
    assert "'reasoning_content'" in missing(THINKING, [USER, thought, LAST, ASSISTANT], learned=[1, 3])


def rows_of(tmp_path, template, rows, write=write_jsonl, name="rows.jsonl"):
    examples, report = load_examples("own", write(tmp_path / name, rows))
    renderer = Renderer(tokenizer_with(template))
    found = renderer.rows([(example, messages_of("own", example)) for example in examples])
    return found, report.without(renderer.left_out), renderer.tokenizer


ROW = {"messages": [USER, CALLS, {"role": "tool", "content": "9"}, LAST], "tools": [SCHEMA], "answer": "9"}


def test_calls_and_tools_of_a_row_are_asked_as_the_template_writes_them(tmp_path):
    (row,), _, tokenizer = rows_of(tmp_path, TOOLS, [ROW])
    theirs = tokenizer.apply_chat_template(
        ROW["messages"], tools=ROW["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert row.ids == theirs
    assert '<tool_call>{"name": "add"' in tokenizer.decode(row.ids)


def test_columns_of_parquet_give_the_same_prompt(tmp_path):
    """It gives each call the arguments of all others, as nulls."""
    other = {"type": "function", "function": {"name": "mul", "arguments": {"c": 1}}}
    second = {**ROW, "messages": [{**USER, "content": "?"}, {**CALLS, "tool_calls": [other]}, *ROW["messages"][2:]]}
    plain, _, _ = rows_of(tmp_path, TOOLS, [ROW, second])
    packed, _, tokenizer = rows_of(tmp_path, TOOLS, [ROW, second], write_parquet, "rows.parquet")
    assert [row.ids for row in packed] == [row.ids for row in plain]
    assert "null" not in "".join(tokenizer.decode(row.ids) for row in packed)


def test_messages_and_tools_may_be_json_text(tmp_path):
    import json

    text = {**ROW, "messages": json.dumps(ROW["messages"]), "tools": json.dumps(ROW["tools"])}
    assert rows_of(tmp_path, TOOLS, [text])[0][0].ids == rows_of(tmp_path, TOOLS, [ROW])[0][0].ids
    refused = load_examples("gsm8k", write_jsonl(tmp_path / "g.jsonl", [{"question": "q", "answer": "1"}, {
        "question": text["messages"], "answer": "9"}]))[1]  # fmt: skip
    assert refused.counts == {"question that is no text": 1}


def test_rows_that_differ_in_calls_or_tools_alone_are_two(tmp_path):
    other = {**ROW, "tools": [{"type": "function", "function": {"name": "sum"}}], "answer": "10"}
    assert len(rows_of(tmp_path, TOOLS, [ROW, other])[0]) == 2


def test_rows_that_are_written_in_part_are_left_out_and_counted(tmp_path, caplog):
    good = [{"messages": [{**USER, "content": f"{number} + 1?"}], "answer": "x"} for number in range(40)]
    developer = {"messages": [{"role": "developer", "content": "Be short."}, USER], "answer": "9", "id": "dev"}
    with caplog.at_level("WARNING"):
        rows, report, _ = rows_of(tmp_path, KNOWN, [developer, ROW, *good])
    assert (len(rows), report.kept, report.dropped) == (40, 40, 2)
    assert "1 row left out (e.g. dev): the chat template writes nothing of a message of the role" in caplog.text
    with pytest.raises(DataError, match=r"no row can be asked: 1 row left out .*role developer: give such"):
        rows_of(tmp_path, KNOWN, [developer])


def test_a_column_tools_that_is_not_schemas_is_left_to_rewards(tmp_path):
    (example,), _ = load_examples("own", write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "q", "tools": "a hammer"}]))
    assert (example.tools, example.extra) == ((), {"tools": "a hammer"})
