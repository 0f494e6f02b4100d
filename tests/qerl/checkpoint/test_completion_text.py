"""The text of a completion: all that was written but the tokens that end or pad it."""

import json
import shutil
from types import SimpleNamespace

import pytest

from qerl.checkpoint.load import CompletionText, load_tokenizer, text_of_engine
from qerl.episodes.endpoint import Chat
from tests.helpers.bases import TINY

SAID = "3 + 4 = 7\n#### 7"


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The embedded tokenizer, which also marks #### as special."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("marked") / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    token = {"id": content["model"]["vocab"]["####"], "content": "####", "special": True}
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({**token, **switches})
    path.write_text(json.dumps(content, ensure_ascii=False))
    return load_tokenizer(str(folder))


def test_tokens_that_are_marked_as_special_are_part_of_the_answer(marked):
    ids = marked(SAID, add_special_tokens=False)["input_ids"]
    assert "####" not in marked.decode(ids, skip_special_tokens=True)
    assert CompletionText(marked, ())([*ids, marked.eos_token_id]) == SAID
    assert text_of_engine(marked, SimpleNamespace()).batch([ids, [marked.eos_token_id], []]) == [SAID, "", ""]


def test_every_token_that_ends_a_completion_in_the_engine_is_left_out(marked):
    ids = marked(SAID, add_special_tokens=False)["input_ids"]
    other = marked.convert_tokens_to_ids("<|im_start|>")
    assert text_of_engine(marked, SimpleNamespace(end_token_ids=(other,)))([*ids, other, marked.pad_token_id]) == SAID
    assert CompletionText(marked, ())([*ids, other]) == f"{SAID}<|im_start|>"


def test_a_turn_with_an_environment_keeps_them_too(marked):
    chat = Chat(marked, (), (marked.eos_token_id,))
    ids = [*marked(SAID, add_special_tokens=False)["input_ids"], marked.eos_token_id]
    assert (chat.decode(ids), chat.action(ids).text) == (SAID, SAID)
