"""Messages in the forms in which chats are stored."""

import json

import pytest

from qerl.data.messages import Asked, UnusableError, as_messages, read_message, read_messages

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
        [{"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
         {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}, {"role": "assistant", "content": "2"}],
        [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}],
    ],
    ids=["messages", "parts", "sharegpt"],
)  # fmt: skip
def test_a_chat_in_each_form_is_the_same(messages):
    assert read_messages(messages) == Asked("1 + 1?", (SYSTEM,), "2", conversational=True)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "q"},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"value": "q"},
        "q",
    ],
)
def test_what_is_no_message_is_named_by_its_number(message):
    with pytest.raises(ValueError, match="its message 2 is no object with a role"):
        read_messages([SYSTEM, message])


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_list_may_be_json_text_also_of_a_json_text(times):
    chat = [SYSTEM, {"role": "user", "content": "1 + 1?"}]
    cell = chat
    for _ in range(times):
        cell = json.dumps(cell)
    assert as_messages(cell) == chat


@pytest.mark.parametrize("cell", ['"[1 and more', '"[1]"', "[1]", '"[]"', "[", '"[\\"', '[{"content": "a"}]'])
def test_other_texts_are_no_messages(cell):
    assert as_messages(cell) is None


@pytest.mark.parametrize(
    "key", ["thought", "thoughts", "reasoning_details", "chain_of_thought", "rationale", "cot", "thinking_blocks"]
)
def test_thoughts_in_a_key_that_is_not_read_are_not_passed_over(key):
    said = {"role": "assistant", "content": "2"}
    for given in ("1 + 1 = 2", [{"text": "1 + 1 = 2"}]):
        with pytest.raises(UnusableError, match=f"its message 2 has {key!r}: call it reasoning_content"):
            read_message({**said, key: given}, 2)
    for given in (None, "", [], float("nan")):
        assert read_message({**said, key: given}, 2) == said
    assert read_message({**said, "reasoning_content": "a", "timestamp": 3, "coat": "b"}, 2)["reasoning_content"] == "a"
