"""Chat templates and tokenizers that loop, grow or crash end in one line; all others give what transformers gives."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.load import load_tokenizer
from qerl.data.tasks import render_prompt
from tests.helpers.bases import TINY

ROOT = Path(__file__).parents[3]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4? ä 中 {{ x }} [/x]"}]
USER = [{"role": "user", "content": "a"}]
TEMPLATES = (
    None,
    "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.role | upper }}: {{ m | tojson }}{% endgeneration %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
)
HOSTILE = {
    "grows": ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters|memory|processor time"),
    "multiplies": ("{{ 'x' * 99999999999 }}", "memory"),
    "formats": ("{{ '%099999999999d' % 1 }}", "memory|large|big"),
    "power": ("{{ 9 ** (9 ** (9 ** 9)) }}", "processor time|memory|digits|large"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without end"),
    "nests": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "without end|ended its process|nested"),
    "waits": ("{% if messages[0].content == 'a' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
              "{% endfor %}{% endif %}ok", "processor time"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.mark.parametrize("template", TEMPLATES, ids=["shipped", "of every kind"])
def test_prompts_are_those_of_transformers(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template or tokenizer.chat_template)
    for messages in (MESSAGES[1:], MESSAGES, USER):
        theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert render_prompt(tokenizer, messages) == theirs


SCHEMAS = """
import sys
from qerl.episodes.build import schema_of

def double(number: int, words: list[str] | None = None) -> int:
    '''Twice as much.

    Args:
        number: any
        words: none
    '''

ours = schema_of(double)
assert not {"torch", "transformers"} & set(sys.modules)
from transformers.utils import get_json_schema
import torch

def hear(sound: torch.Tensor):
    '''Hear.

    Args:
        sound: any
    '''

assert [ours, schema_of(hear)] == [get_json_schema(double), get_json_schema(hear)]
"""


def test_schemas_are_those_of_transformers_which_is_not_loaded_for_them():
    """Each process of an environment would take 3 s of processor time for it."""
    done = subprocess.run([sys.executable, "-c", SCHEMAS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_half_characters_of_stdin_are_replaced(tokenizer):
    assert render_prompt(tokenizer, [{"role": "user", "content": "a\udc80"}]) == render_prompt(
        tokenizer, [{"role": "user", "content": "a?"}]
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_end_is_one_error(tokenizer, monkeypatch, name):
    monkeypatch.setattr("qerl.base.sandbox.CPU_S", 1)
    template, said = HOSTILE[name]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=said):
        render_prompt(tokenizer, USER)
    assert time.monotonic() - began < 120
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    assert tokenizer.decode(render_prompt(tokenizer, USER)) == "a"


CHANGES = {
    "pattern": ("pre_tokenizer", {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }),
    "padding": ("padding", {
        "strategy": {"Fixed": 10**11}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }),
    "growth": ("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4}),
    "model": ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": [["b", "c"]]}),
    "nested": ("model", json.loads("[" * 500 + "]" * 500)),
    "added": ("added_tokens", [{"id": 10**12, "content": "x"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_without_end_is_one_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr("qerl.base.sandbox.CPU_S", 1)
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    key, value = CHANGES[name]
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, key: value}))
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}])
def test_an_odd_value_of_a_tokenizer_is_one_error(tmp_path, value):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, "model_max_length": value}))
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        load_tokenizer(folder)


def test_a_folder_is_found_from_wherever_the_process_is_by_now(tmp_path, monkeypatch):
    load_tokenizer("tiny")  # the worker starts here, and stays
    shutil.copytree(TINY, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    load_tokenizer("model")
