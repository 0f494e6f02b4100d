"""A model has a chat template in its tokenizer's configuration or in a file beside it."""

import json

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.load import check_chat_template
from qerl.checkpoint.resolve import resolve_model
from tests.helpers.model_folders import without_template


def test_a_template_may_stand_in_the_config_or_beside_it(tmp_path):
    folder = without_template(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"base has no chat template.*or put a chat_template\.jinja into"):
        check_chat_template(resolve_model(str(folder)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    check_chat_template(resolve_model(str(folder)))
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "{{ messages }}"}))
    check_chat_template(resolve_model(str(folder)))
    config.unlink()
    check_chat_template(resolve_model(str(folder)))  # a missing tokenizer is named by who loads it
    check_chat_template(resolve_model("tiny"))
