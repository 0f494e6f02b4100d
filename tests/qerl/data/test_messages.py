"""Messages in the forms in which chats are stored."""

import pytest

from qerl.data.messages import Asked, read_messages

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
        [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
            {"role": "assistant", "content": "2"},
        ],
        [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "1 + 1?"},
            {"from": "gpt", "value": "2"},
        ],
    ],
    ids=["messages", "parts", "sharegpt"],
)
def test_a_chat_in_each_form_is_the_same(messages):
    assert read_messages(messages) == Asked("1 + 1?", (SYSTEM,), "2")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "q"},
        {"role": "usr", "content": "q"},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"from": "bard", "value": "q"},
        {"from": "human"},
        "q",
    ],
)
def test_what_is_no_message_is_named_by_its_number(message):
    with pytest.raises(ValueError, match="its message 2 is no object with a role"):
        read_messages([SYSTEM, message])
