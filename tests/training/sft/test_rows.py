"""The rows of a run on conversations: what is said of those that are left out, with a remedy for the reason."""

import json

import pytest

from qerl.base.errors import DataError
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.shards import read_json
from qerl.plan.sizes import sizes_of
from tests.helpers.bases import TINY
from tests.helpers.small_sft import TALKS, small_sft
from training.sft.marking import Marker
from training.sft.rows import marked_rows

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + CHATML
SYSTEM = {"role": "system", "content": "Be short."}


def read(folder, *overrides, rows=None, template=CHATML, end="<|im_end|>"):
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.chat_template = template
    config = small_sft(TINY, folder, *overrides, rows=rows)
    sizes = sizes_of(read_json(TINY / "config.json"), "tiny")
    return marked_rows(config, Marker(tokenizer, [tokenizer.convert_tokens_to_ids(end)]), sizes)


def test_a_template_without_a_system_role_gets_that_remedy(tmp_path):
    rows = [{"messages": [SYSTEM, *talk]} for talk in TALKS]
    with pytest.raises(DataError, match=r"No system role; if it has no system role, set data.system_prompt") as error:
        read(tmp_path, rows=rows, template=NO_SYSTEM)
    assert "max_tokens" not in str(error.value)
    with pytest.raises(DataError, match="No system role; if it has no system role"):
        read(tmp_path, "data.system_prompt=Be short.", template=NO_SYSTEM)


def test_rows_that_are_too_long_get_theirs(tmp_path):
    with pytest.raises(DataError, match=r"longer than sft.max_tokens=8: raise sft.max_tokens$"):
        read(tmp_path, "sft.max_tokens=8")
    with pytest.raises(DataError, match=r"fewer than the 8 of a step: give more rows, raise sft.max_tokens, or lower"):
        read(tmp_path, "sft.max_tokens=40", "sft.rows_per_step=8")


def test_too_few_rows_are_not_told_to_be_longer(tmp_path):
    with pytest.raises(DataError, match=r"1 usable rows are fewer than the 4 of a step: give more rows, or lower"):
        read(tmp_path, rows=[{"messages": TALKS[0]}])


def test_answers_that_would_not_end_are_told_once(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        read(tmp_path)
        assert "no token that ends" not in caplog.text
        read(tmp_path, end="<|endoftext|>")
    assert caplog.text.count("12 learned answers hold no token that ends a completion (<|endoftext|>)") == 1


def test_held_out_rows_are_not_learned(tmp_path):
    """By default the last tenth; data.held_out says how many."""
    every = "validation.every=2"
    ids = [row.id for row in read(tmp_path, "validation.every=null").trained]
    for settings, count, measured in (
        ((), 1, 1),
        (("data.held_out=4",), 4, 4),
        (("data.held_out=4", "validation.limit=2"), 4, 2),
    ):
        found = read(tmp_path, every, *settings)
        assert [row.id for row in found.trained] == ids[:-count]
        assert [row.id for row in found.held_out] == ids[-count:][:measured]


def test_rows_of_validation_that_are_learned_are_left_out(tmp_path, caplog):
    other = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in (TALKS[0], other, TALKS[1])))
    found = read(tmp_path, "validation.every=2", f"validation.source={file}")
    assert len(found.held_out) == 1
    assert len(found.trained) == len(read(tmp_path, "validation.every=null").trained)
    assert tuple(found.held_out[0].ids) not in {tuple(row.ids) for row in found.trained}
