"""Calibration rows become sequences of exactly the requested length, and no row is dropped silently."""

import json
import re

import pytest

from qerl.base.errors import DataError
from quantize.calibration import load_calibration
from tests.helpers.checkpoint_factory import make_tokenizer
from tests.helpers.row_files import write_jsonl

QUESTION = {"question": "What is 3 plus 4?", "answer": "The answer is 7."}
CHAT = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "The answer is 7."}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def rendered(tokenizer, messages=CHAT):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_rows_are_joined_and_cut_without_a_gap(tokenizer, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [QUESTION] * 50)
    one = rendered(tokenizer)
    found = load_calibration(data, tokenizer, size=4, sequence_length=len(one) + 3)
    assert [len(sequence) for sequence in found.sequences] == [len(one) + 3] * 4
    joined = [token for sequence in found.sequences for token in sequence]
    assert joined == (one * 5)[: len(joined)]
    assert found.rows == 5  # no more rows than needed are read
    size = {"sequences": 4, "sequence_length": len(one) + 3, "tokens": 4 * (len(one) + 3)}
    assert found.summary() == {"data": data, **size, "rows": 5, "unusable_rows": 0}


@pytest.mark.parametrize(
    "row",
    [
        QUESTION,
        {"messages": CHAT},
        {"conversations": CHAT},
        {"prompt": CHAT[:1], "solution": "The answer is 7."},
        {"problem": "What is 3 plus 4?", "solution": "The answer is 7.", "level": 3},
        {"instruction": "What is 3 plus 4?", "output": "The answer is 7."},
    ],
)
def test_common_kinds_of_rows_are_rendered_with_the_models_chat_template(tokenizer, tmp_path, row):
    length = len(rendered(tokenizer))
    found = load_calibration(write_jsonl(tmp_path / "rows.jsonl", [row]), tokenizer, 1, length)
    assert found.sequences == [rendered(tokenizer)]


def test_plain_text_ends_with_the_end_token(tokenizer, tmp_path):
    ids = [*tokenizer("The answer is 7.")["input_ids"], tokenizer.eos_token_id]
    found = load_calibration(
        write_jsonl(tmp_path / "rows.jsonl", [{"text": "The answer is 7."}]), tokenizer, 1, len(ids)
    )
    assert found.sequences == [ids]


def test_without_a_chat_template_the_plain_text_is_used(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    ids = [*tokenizer("What is 3 plus 4?\n\nThe answer is 7.")["input_ids"], tokenizer.eos_token_id]
    assert load_calibration(write_jsonl(tmp_path / "rows.jsonl", [QUESTION]), tokenizer, 1, len(ids)).sequences == [ids]


def test_rows_are_shuffled_the_same_way_every_time(tokenizer, tmp_path):
    rows = [{"text": f"row {number}"} for number in range(40)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    first, again = (load_calibration(data, tokenizer, 1, 60).sequences for _ in range(2))
    assert first == again
    numbers = [int(part) for part in re.findall(r"row (\d+)<", tokenizer.decode(first[0]))]
    assert len(numbers) > 5
    assert numbers != sorted(numbers)


def test_our_own_tasks_can_calibrate_without_a_network_if_they_have_training_rows(tokenizer):
    with pytest.raises(DataError, match="aime24 is for evaluation and has no training rows"):
        load_calibration("aime24", tokenizer, 1, 64)
    found = load_calibration("arith", tokenizer, 2, 64)
    assert [len(sequence) for sequence in found.sequences] == [64, 64]


def test_unusable_rows_and_missing_sequences_are_reported(tokenizer, tmp_path, caplog):
    rows = [QUESTION, {"image": "x.png"}, {"question": " "}, [1, 2], QUESTION]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\nbroken {\n")
    length = len(rendered(tokenizer))
    found = load_calibration(str(tmp_path / "rows.jsonl"), tokenizer, 3, length)
    assert (len(found.sequences), found.rows, found.unusable_rows) == (2, 2, 4)
    assert "is enough for 2 sequences" in caplog.text
    assert "4 rows have no usable text" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"image": "x.png", "label": 3}\n', r"none of 1 rows can be used .* \(fields of one: image, label\)"),
        (json.dumps(QUESTION), r"gives \d+ tokens from 1 rows, less than one sequence of 64: .*--sequence-length \d+"),
    ],
)
def test_too_little_data_is_refused(tokenizer, tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_calibration(str(tmp_path / "rows.jsonl"), tokenizer, 1, 64)
