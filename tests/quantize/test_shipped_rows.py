"""The calibration rows that ship with qerl: three kinds take turns, with their licences and near no evaluation set."""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import calibration_rows
import pytest

from qerl.data.rows import local_rows
from qerl.data.sequences import tokens_of
from quantize.calibration import load_calibration, shipped_rows
from tests.helpers.checkpoint_factory import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gsm8k", "dapo_math", "docs")
NOT_MARKED = {"eval_exact": [], "eval_near": []}


@pytest.fixture(scope="module")
def rows():
    return [row for _, row in local_rows(str(shipped_rows()), "train")]


@pytest.fixture(scope="module")
def of_text(rows):
    """A tokenizer whose vocabulary was made for such texts."""
    from tiny_tokenizer import bpe_tokenizer

    texts = (row.get("text") or "\n".join(turn["content"] for turn in row["messages"]) for row in rows)
    return bpe_tokenizer(texts, 4000)


def sources():
    """Sources that are just enough, with rows among them that may not be taken."""
    bad = [{"eval_exact": ["gsm8k"]}, {"eval_near": ["math500"]}]
    bad_dapo = [*bad, {"lang": "zh"}, {"dup": True}, {"conflict": True}]
    gsm8k = [
        {"question": f"q{number}", "solution": f"1+1 = <<1+1=2>>2, {number}\n#### 2", **NOT_MARKED, **marks}
        for number, marks in enumerate([*bad, *[{}] * 192])
    ]
    dapo = [
        {"question": f"d{number}", "lang": "en", "dup": False, "conflict": False, **NOT_MARKED, **marks}
        for number, marks in enumerate([*bad_dapo, *[{}] * 192])
    ]
    paragraphs = [f"Paragraph {number}. " + "x " * 450 for number in range(64)]
    page = "\n\n".join(["# Head", "| a | b |\n|---|---|\n| 1 | 2 |", *paragraphs])
    return gsm8k, dapo, [page]


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


def test_rows_near_an_evaluation_set_are_never_taken():
    gsm8k, dapo, pages = sources()
    taken = calibration_rows.mixed(gsm8k, dapo, pages)
    asked = {row["messages"][0]["content"] for row in taken if row["kind"] != "docs"}
    assert asked == {f"q{number}" for number in range(2, 194)} | {f"d{number}" for number in range(5, 197)}
    with pytest.raises(SystemExit, match="GSM8K has 191 rows that may be taken, and 192 are needed"):
        calibration_rows.mixed([{**gsm8k[-1], "eval_near": ["gsm8k"]}, *gsm8k[:-1]], dapo, pages)


def test_the_script_gives_the_same_bytes_again_in_the_form_of_the_file(rows, tmp_path):
    gsm8k, dapo, pages = sources()
    for name, given in (("gsm8k.jsonl", gsm8k), ("dapo.jsonl", dapo)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(pages[0])
    names = [tmp_path / "gsm8k.jsonl", tmp_path / "dapo.jsonl", tmp_path / "docs"]
    for out in ("one", "two"):
        script = [sys.executable, calibration_rows.__file__, *names, "--out", tmp_path / out]
        subprocess.run(script, check=True, capture_output=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    made = calibration_rows.read((tmp_path / "one").rename(tmp_path / "one.jsonl.gz"))
    assert [(row["kind"], *row) for row in made] == [(row["kind"], *row) for row in rows]
    assert made[0]["messages"][1]["content"].startswith("1+1 = 2, ")
    assert "|" not in made[2]["text"]


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


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="a wheel is built with setuptools")
def test_the_wheel_holds_the_rows_and_their_licences(tmp_path):
    packages = ("qerl", "quantize", "training", "eval")
    for name in packages:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert file.read("quantize/rows/mixed.jsonl.gz") == shipped_rows().read_bytes()
        texts = file.read("quantize/rows/LICENSES").decode()
        assert any(name.endswith("licenses/quantize/rows/LICENSES") for name in file.namelist())
    for part in ("MIT License", "Copyright (c) 2021 OpenAI", "TERMS AND CONDITIONS FOR USE", "Bytedance"):
        assert part in texts
    assert {kind for kind in KINDS if f'kind "{kind}"' in texts} == set(KINDS)
