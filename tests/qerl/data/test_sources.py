"""Where rows come from: files, folders, the hub and its layouts, and what cannot be read."""

import gzip

import pytest

from qerl.base.errors import DataError
from qerl.data.examples import load_examples
from qerl.data.grading.grade import grade
from tests.helpers.row_files import ROWS, write_jsonl, write_parquet


def test_the_layout_of_dapo_math_on_the_hub(tmp_path):
    """BytedTsinghua-SIA/DAPO-Math-17k has verl's layout: the problem is inside an instruction, and rows repeat."""
    prefix = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    suffix = '\n\nRemember to put your answer on its own line after "Answer:".'
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{prefix}Find {n}.{suffix}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"uuid-{n}"},
        }
        for n in range(4)
    ]
    path = write_parquet(tmp_path / "dapo.parquet", rows * 100)
    examples, report = load_examples("dapo_math", path)
    assert [(e.question, e.answer) for e in examples] == [(f"Find {n}.", str(n)) for n in range(4)]
    assert report.counts == {"duplicate": 396}
    assert examples[0].extra["data_source"] == "math_dapo"
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"question": "Find 7.", "answer": "7"}])
    assert load_examples("dapo_math", bare)[0][0].question == "Find 7."


def test_the_layout_of_dapo_math_without_repetitions(tmp_path):
    """In open-r1/DAPO-Math-17k-Processed `prompt` is text, next to the columns of verl."""
    rows = [
        {
            "prompt": f"Find {n}.",
            "solution": str(n),
            "data_source": "math_dapo",
            "source_prompt": [{"content": f"Solve: Find {n}.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"uuid-{n}"},
        }
        for n in range(4)
    ]
    examples, report = load_examples("dapo_math", write_parquet(tmp_path / "en.parquet", rows))
    assert [(e.question, e.answer) for e in examples] == [(f"Find {n}.", str(n)) for n in range(4)]
    assert report.dropped == 0


BIG_MATH = [
    ("Simplify $\\sqrt{50}$.", "5\\sqrt{2}", "math", ["Mathematics -> Algebra"], 0.40625),
    ("What is 3 of 8, in percent?", "37.5\\%", "orca_math", ["Mathematics -> Applied"], 0.984375),
    ("Give the interval.", "(-\\infty, 3)", "olympiads", [], 0.015625),
]


@pytest.mark.parametrize("task", ["bigmath", "bigmath_hard"])
@pytest.mark.parametrize("columns", [("prompt", "solution"), ("problem", "answer")])
def test_the_layouts_of_big_math_on_the_hub(tmp_path, task, columns):
    """open-r1 has a folder of parquet files per level; the set of SynthLabs has other names for the columns."""
    names = (*columns, "source", "domain", "llama8b_solve_rate")
    (tmp_path / "level_3").mkdir()
    rows = [dict(zip(names, row, strict=True)) for row in BIG_MATH]
    write_parquet(tmp_path / "level_3" / "train-00000-of-00001.parquet", rows)
    examples, report = load_examples(task, str(tmp_path / "level_3"))
    assert [(e.question, e.answer) for e in examples] == [row[:2] for row in BIG_MATH]
    assert examples[0].extra == {"source": "math", "domain": ["Mathematics -> Algebra"], "llama8b_solve_rate": 0.40625}
    assert report.dropped == 0
    assert [grade(task, f"\\boxed{{{row[1]}}}", row[1]).correct for row in BIG_MATH] == [True] * 3
    assert not grade(task, "\\boxed{5\\sqrt{3}}", BIG_MATH[0][1]).correct
    with pytest.raises(DataError, match=r"\(data files: none; folders: level_3\): pass one of these instead"):
        load_examples(task, str(tmp_path))


@pytest.mark.parametrize(
    ("task", "source", "asked"),
    [
        ("bigmath", None, ("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5")),
        ("bigmath_hard", None, ("open-r1/Big-Math-RL-Verified-Processed", "level_4_5")),
        ("bigmath", "open-r1/Big-Math-RL-Verified-Processed:all", ("open-r1/Big-Math-RL-Verified-Processed", "all")),
        ("bigmath", "SynthLabsAI/Big-Math-RL-Verified", ("SynthLabsAI/Big-Math-RL-Verified", None)),
    ],
)
def test_a_hub_id_may_name_a_subset(monkeypatch, task, source, asked):
    """Everything except the download: the request to the hub."""
    import datasets

    seen = []
    data = datasets.Dataset.from_list([{"prompt": "2+2?", "solution": "4"}])
    monkeypatch.setattr("qerl.data.rows.reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: seen.append((args, kwargs)) or data)
    _, report = load_examples(task, source)
    assert seen == [(asked, {"split": "train"})]
    assert report.source == (source or asked[0])


def test_from_a_folder_the_files_of_the_split_are_read(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", [*ROWS[2:4], {"question": "x", "answer": "y"}])
    write_jsonl(tmp_path / "test.jsonl", ROWS[4:])
    (tmp_path / "README.md").write_text("no data")
    examples, report = load_examples("gsm8k", str(tmp_path), split="train")
    assert [e.answer for e in examples] == ["1", "2", "3", "4"]
    assert report.named == ("train-00001-of-00002.parquet row 3: the answer 'y' is no number",)
    assert [e.answer for e in load_examples("gsm8k", str(tmp_path), split="test")[0]] == ["5"]


def test_for_a_folder_without_the_split_its_files_are_listed(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file of the split 'train' \(data files: test\.jsonl\)"):
        load_examples("gsm8k", str(tmp_path), split="train")
    (tmp_path / "test.jsonl").rename(tmp_path / "mine.jsonl")
    assert len(load_examples("gsm8k", str(tmp_path), split="train")[0]) == 5


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n' * 1000)[:-30])
    whole = gzip.compress(b'{"question": "a", "answer": "1"}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(whole[:12] + b"\xff" + whole[13:])
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é", "answer": "1"}\n'.encode("latin-1"))
    (tmp_path / "no.parquet").write_bytes(b"PAR1 this is none")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    (tmp_path / "twice.csv").write_text("question,answer,answer\na,1,2\n")
    for name, message in {
        "cut.jsonl.gz": "cannot be read",
        "torn.jsonl.gz": "cannot be read",
        "/dev/null": "ending ''",
        "latin.jsonl": "UTF-8",
        "no.parquet": "no parquet file",
        "empty.jsonl": "holds no rows",
        "a.xlsx": "ending '.xlsx'",
        "twice.csv": "two columns 'answer'.*rename one",
        "missing.jsonl": "no file or folder",
    }.items():
        with pytest.raises(DataError, match=message):
            load_examples("gsm8k", str(tmp_path / name))


def test_for_a_missing_split_the_error_says_what_to_pass():
    with pytest.raises(DataError, match=r"math500 has no split 'train', only test: .*--data FILE"):
        load_examples("math500", split="train")


def test_a_source_that_is_neither_a_file_nor_a_hub_id_is_refused():
    with pytest.raises(DataError, match="'gsm8k' is neither a file nor a hub id"):
        load_examples("gsm8k", "gsm8k")


def test_for_an_unreachable_hub_the_error_says_to_pass_a_file(monkeypatch):
    import datasets

    monkeypatch.setattr("qerl.data.rows.reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"'owner/no-such-data' .*could not be read from the hub.*--data FILE"):
        load_examples("gsm8k", "owner/no-such-data")
