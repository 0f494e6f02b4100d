"""The calibration rows that ship with qerl: three kinds take turns, with their licences and near no evaluation set."""

import json

import pytest

from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.load import load_tokenizer
from qerl.data.rows import local_rows
from qerl.data.sequences import tokens_of
from quantize.calibration import load_calibration, shipped_rows
from tests.helpers.checkpoint_factory import make_tokenizer

KINDS = ("gsm8k", "dapo_math", "docs")


@pytest.fixture(scope="module")
def rows():
    return [row for _, row in local_rows(str(shipped_rows()), "train")]


@pytest.fixture(scope="module")
def of_text(rows):
    """A tokenizer whose vocabulary was made for such texts."""
    texts = (row.get("text") or "\n".join(turn["content"] for turn in row["messages"]) for row in rows)
    return load_tokenizer(TINY_FOLDER).train_new_from_iterator(texts, 4000)


def test_any_seven_rows_hold_all_kinds_in_the_same_shares(rows):
    kinds = [row["kind"] for row in rows]
    assert [kinds.count(kind) for kind in KINDS] == [192, 192, 64]
    for start in range(0, len(kinds), 7):
        assert [kinds[start : start + 7].count(kind) for kind in KINDS] == [3, 3, 1]


def test_solutions_have_no_calculator_marks_and_no_question_comes_twice(rows):
    texts = [row.get("text") or row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts)
    assert not [row for row in rows if "<<" in json.dumps(row.get("messages"))]
    answers = [row["messages"][1]["content"] for row in rows if row["kind"] == "gsm8k"]
    assert all("\n#### " in answer for answer in answers)


def test_each_kind_is_rendered_as_what_it_is(rows):
    tokenizer = make_tokenizer()
    gsm8k, dapo, docs = (next(row for row in rows if row["kind"] == kind) for kind in KINDS)
    for row in (gsm8k, dapo):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert tokenizer.decode(tokens_of(row, tokenizer)) == text
        assert text.count("<|im_start|>assistant") == (row["kind"] == "gsm8k")
    assert tokenizer.decode(tokens_of(docs, tokenizer)) == docs["text"] + tokenizer.eos_token


def test_the_held_out_rows_are_others_of_all_kinds(rows, of_text, caplog):
    found = load_calibration("mixed", of_text, 256, 1024, 16)
    held, used = ("".join(of_text.decode(ids) for ids in part) for part in (found.held_out, found.sequences))
    assert found.summary()["tokens"] > 60_000
    assert found.rows == len(rows)
    assert "is enough for" not in caplog.text  # nobody chose how many rows ship
    places = {"held": [], "used": []}
    for row in rows:
        start = (row.get("text") or row["messages"][0]["content"])[:80]
        for name, text in (("held", held), ("used", used)):
            places[name] += [row["kind"]] if start in text else []
    assert set(places["held"]) == set(KINDS) == set(places["used"])
    assert len(places["held"]) + len(places["used"]) == len(rows)


def test_few_sequences_are_mixed_too(of_text):
    found = load_calibration("mixed", of_text, 2, 1024, 2)
    assert (len(found.sequences), len(found.held_out)) == (2, 2)
    assert found.rows < 30
    shared = load_calibration("mixed", of_text, 1, 1024, 2)
    assert shared.held_out == found.held_out
    assert shared.sequences == found.sequences[:1]
