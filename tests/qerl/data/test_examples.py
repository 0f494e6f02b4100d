"""Rows from files and from the hub's layouts: each is used, or counted and named."""

import gzip
import json
import logging
from decimal import Decimal
from pathlib import Path

import pytest

from qerl.errors import ConfigError, DataError
from qerl.tasks import get_task, grade, load_examples

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "test.jsonl"
ROWS = [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_csv(path, rows, delimiter=","):
    lines = [delimiter.join(rows[0]), *(delimiter.join(f'"{cell}"' for cell in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def write(path, rows):
    name = path.name
    if name.endswith(".parquet"):
        return write_parquet(path, rows)
    if name.endswith((".csv", ".tsv")):
        return write_csv(path, rows, "\t" if name.endswith(".tsv") else ",")
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_each_format_gives_the_same_examples(name, tmp_path):
    examples, report = load_examples("gsm8k", write(tmp_path / name, ROWS))
    assert [(e.question, e.answer, e.id) for e in examples] == [
        (row["question"], row["answer"], str(number)) for number, row in enumerate(ROWS, start=1)
    ]
    assert (report.total, report.kept, report.dropped) == (5, 5, 0)


def test_answers_keep_their_spelling(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"one, two",033\nb,"1,800"\nc,1e3\n', encoding="utf-8")
    assert [e.answer for e in load_examples("aime24", str(path))[0]] == ["033", "1,800", "1e3"]


def test_answers_may_be_json_numbers_of_mixed_types(tmp_path):
    rows = [{"question": "a", "answer": 18}, {"question": "b", "answer": 27.0}, {"question": "c", "answer": "3"}]
    assert [e.answer for e in load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows))[0]] == ["18", "27.0", "3"]


def test_other_columns_and_ids_are_kept(tmp_path):
    rows = [{"unique": "x1", "problem": "p", "gold": "5", "level": 3}, {"unique": "x1", "problem": "q", "gold": "6"}]
    columns = {"question": "problem", "answer": "gold", "id": "unique"}
    examples, _ = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows), columns=columns)
    assert examples[0].extra == {"level": 3}
    assert [e.id for e in examples] == ["x1", "x1@2"], "ids are unique even if the file's are not"


UNUSABLE = [
    ({"answer": "1"}, "no question"),
    ({"question": "q1"}, "no answer"),
    ({"question": "q2", "answer": None}, "no answer"),
    ({"question": " \n", "answer": "1"}, "empty question"),
    ({"question": "q3", "answer": "  "}, "empty answer"),
    ({"question": "q4", "answer": "eighteen"}, "answer that is no number"),
    ({"question": "q5", "answer": "18 or 19"}, "answer that is no number"),
    ({"question": "q6", "answer": "no mark #### "}, "empty answer"),
    ({"question": "q7", "answer": True}, "answer that is no text"),
    ({"question": ["q8"], "answer": "1"}, "question that is no text"),
    ({"question": "What is  0+1?", "answer": "1.0"}, "duplicate"),
    ({"question": "q9", "answer": "2", "dup": True}, "duplicate"),
    ({"question": "q10", "answer": "2", "conflict": True}, "question with two answers"),
    ({"question": "q11", "answer": "2", "eval_exact": ["amc23"]}, "question of an evaluation set"),
    ({"question": "q12", "answer": "2", "eval_near": ["gsm8k"]}, "question of an evaluation set"),
    ({"question": "q13", "answer": "2", "eval_near": "gsm8k"}, "question of an evaluation set"),
    ({"question": "q14", "answer": "2", "eval_near": 1}, "question of an evaluation set"),
    ("no object", "no readable row"),
]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE, ids=[f"{index}-{r}" for index, (_, r) in enumerate(UNUSABLE)])
def test_a_row_that_cannot_be_used_is_counted_and_named(row, reason, tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], row, *ROWS[2:]])
    with caplog.at_level(logging.WARNING):
        examples, report = load_examples("gsm8k", path)
    assert [e.id for e in examples] == ["1", "2", "4", "5", "6"]
    assert report.counts == {reason: 1}
    assert report.total == 6
    assert report.named[0].startswith("row 3: ")
    assert f"1 {reason} (e.g. row 3: " in caplog.text


def test_a_broken_line_is_named_and_the_others_are_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "ans\n\n{"question": "c", "answer": "3"}\n')
    examples, report = load_examples("gsm8k", str(path))
    assert [e.answer for e in examples] == ["1", "3"]
    assert report.named == ("row 2: no readable row",)


def test_a_csv_row_of_too_many_cells_is_a_broken_one(tmp_path):
    """Its comma is in the question, and what follows it is no answer."""
    path = tmp_path / "a.csv"
    path.write_text('question,answer\nWhat is 1, or so?,1\n"What is 2, or so?",2\nWhat is 3, 3,or so?,3\n')
    examples, report = load_examples("gsm8k", str(path))
    assert [(e.question, e.answer, e.extra) for e in examples] == [("What is 2, or so?", "2", {})]
    assert report.named == ("row 1: no readable row", "row 3: no readable row")


def test_decimal_numbers_of_parquet_are_answers(tmp_path):
    rows = [{"question": "a", "answer": Decimal("1.50")}, {"question": "b", "answer": Decimal("2.00")}]
    write_parquet(tmp_path / "a.parquet", rows)
    assert [e.answer for e in load_examples("gsm8k", str(tmp_path / "a.parquet"))[0]] == ["1.50", "2.00"]


def test_two_answers_to_one_question_drop_both(tmp_path):
    rows = [*ROWS, {"question": "What is 0+1?", "answer": "2"}, {"question": "What is 0 + 1?", "answer": "1"}]
    examples, report = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows))
    assert [e.id for e in examples] == ["2", "3", "4", "5"]
    assert report.counts == {"question with two answers": 2, "duplicate": 1}
    assert report.named[0] == "row 1: its question stands in row 6 with another answer"


def test_evaluation_keeps_the_rows_that_training_leaves_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "2", "eval_exact": ["amc23"]}])
    assert len(load_examples("gsm8k", path, split="test")[0]) == 1
    with pytest.raises(DataError, match=r"no row can be trained .* 1 question of an evaluation set"):
        load_examples("gsm8k", path, split="train")


def test_a_limit_counts_usable_rows(tmp_path):
    rows = [{"question": "a", "answer": ""}, *ROWS]
    examples, report = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows), limit=2)
    assert [e.id for e in examples] == ["2", "3"]
    assert (report.total, report.kept, report.beyond_limit) == (6, 5, 3)
    assert "5 of 6 rows" in str(report)
    assert "the first 2 are used" in str(report)
    with pytest.raises(ConfigError, match="limit is 0"):
        load_examples("gsm8k", str(GSM8K), limit=0)


def test_worked_solutions_give_the_answer_they_mark(tmp_path):
    """The hub's GSM8K has the worked solution, and the hub's AIME mirrors a box, where the answer should be."""
    examples, report = load_examples("gsm8k", str(GSM8K), columns={"answer": "solution"})
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert [e.answer.replace(",", "") for e in examples] == [row["answer"] for row in rows]
    assert report.dropped == 0
    rows = [{"problem": "a", "solution": "so $\\boxed{\\frac{1}{2}}$."}, {"problem": "b", "solution": "\\boxed{7"}]
    columns = {"question": "problem", "answer": "solution"}
    examples, report = load_examples("math500", write_jsonl(tmp_path / "a.jsonl", rows), columns=columns)
    assert [e.answer for e in examples] == ["\\frac{1}{2}"]
    assert report.named == ("row 2: empty answer",)


def test_the_layout_of_dapo_math_on_the_hub(tmp_path):
    """verl's layout, as BytedTsinghua-SIA/DAPO-Math-17k has it: the problem within an instruction, rows repeated."""
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
    """open-r1/DAPO-Math-17k-Processed: `prompt` is text there, and verl's columns stand beside it."""
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
    """open-r1's levels, each a folder of parquet files, and the set of SynthLabs: two names for each column."""
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


def test_an_answer_counts_before_a_worked_solution(tmp_path):
    row = {"prompt": "2+2?", "solution": "We add two and two, and have it.", "answer": "4"}
    assert load_examples("bigmath", write_jsonl(tmp_path / "a.jsonl", [row]))[0][0].answer == "4"


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
    """Everything but the download: what is asked of the hub."""
    import datasets

    seen = []
    data = datasets.Dataset.from_list([{"prompt": "2+2?", "solution": "4"}])
    monkeypatch.setattr("qerl.data.rows.reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: seen.append((args, kwargs)) or data)
    _, report = load_examples(task, source)
    assert seen == [(asked, {"split": "train"})]
    assert report.source == (source or asked[0])


def test_a_missing_column_names_those_present_and_how_to_map(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "solution": "5", "n": 1}])
    with pytest.raises(
        DataError, match=r"no column 'question'.*its columns: problem, solution, n.*--columns question="
    ):
        load_examples("gsm8k", path)
    with pytest.raises(DataError, match=r"no column 'answer' for the answer"):
        load_examples("math500", path)
    with pytest.raises(DataError, match=r"no column 'answr'"):
        load_examples("math500", path, columns={"answer": "answr"})
    with pytest.raises(ConfigError, match=r"maps 'anser', which is unknown"):
        load_examples("math500", path, columns={"anser": "solution"})


def test_nested_columns_can_be_mapped(tmp_path):
    rows = [
        {"chat": [{"role": "system", "text": "s"}, {"role": "user", "text": f"q{n}"}], "a": {"b.c": n}} for n in (1, 2)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    columns = {"question": "chat.1.text", "answer": "a"}
    with pytest.raises(DataError, match="2 answer that is no text"):
        load_examples("gsm8k", path, columns=columns)
    rows = [{**row, "a.b": "7"} for row in rows]
    path = write_jsonl(tmp_path / "b.jsonl", rows)
    examples, _ = load_examples("gsm8k", path, columns={"question": "chat.1.text", "answer": "a.b"})
    assert [(e.question, e.answer) for e in examples] == [("q1", "7"), ("q2", "7")]


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", [*ROWS[2:4], {"question": "x", "answer": "y"}])
    write_jsonl(tmp_path / "test.jsonl", ROWS[4:])
    (tmp_path / "README.md").write_text("no data")
    examples, report = load_examples("gsm8k", str(tmp_path), split="train")
    assert [e.answer for e in examples] == ["1", "2", "3", "4"]
    assert report.named == ("train-00001-of-00002.parquet row 3: the answer 'y' is no number",)
    assert [e.answer for e in load_examples("gsm8k", str(tmp_path), split="test")[0]] == ["5"]


def test_a_folder_without_the_split_lists_its_files(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file of the split 'train' \(data files: test\.jsonl\)"):
        load_examples("gsm8k", str(tmp_path), split="train")
    (tmp_path / "test.jsonl").rename(tmp_path / "mine.jsonl")
    assert len(load_examples("gsm8k", str(tmp_path), split="train")[0]) == 5


def test_files_that_cannot_be_read_say_so(tmp_path):
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


def test_a_split_that_does_not_exist_says_what_to_pass():
    with pytest.raises(DataError, match=r"math500 has no split 'train', only test: .*--data FILE"):
        load_examples("math500", split="train")


def test_a_source_that_is_neither_file_nor_hub_id():
    with pytest.raises(DataError, match="'gsm8k' is neither a file nor a hub id"):
        load_examples("gsm8k", "gsm8k")


def test_an_unreachable_hub_says_to_pass_a_file(monkeypatch):
    import datasets

    monkeypatch.setattr("qerl.data.rows.reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"'owner/no-such-data' .*could not be read from the hub.*--data FILE"):
        load_examples("gsm8k", "owner/no-such-data")


def test_the_hub_path_reads_what_datasets_gives(monkeypatch):
    """Everything but the download: the rows come from a real `datasets.Dataset` of the hub's GSM8K layout."""
    import datasets

    asked = []
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    data = datasets.Dataset.from_list([{"question": row["question"], "answer": row["solution"]} for row in rows])
    monkeypatch.setattr("qerl.data.rows.reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or data)
    examples, report = load_examples("gsm8k", split="test")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert [e.answer.replace(",", "") for e in examples] == [row["answer"] for row in rows]
    assert report.source == "openai/gsm8k"


def test_a_task_that_makes_its_rows_needs_no_data():
    examples, report = load_examples("arith", split="test", limit=10)
    assert len(examples) == 10
    assert report.source == "task arith (test)"
    assert get_task("arith").hub is None


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_text_that_no_tokenizer_takes_and_numbers_that_python_refuses_are_left_out(tmp_path, name):
    good = json.dumps(ROWS[0])
    half = '{"question": "\\ud800 and 2?", "answer": "3"}'
    long = '{"question": "How many?", "answer": ' + "9" * 5000 + "}"
    (tmp_path / name).write_text("\n".join([good, half, long]), encoding="utf-8")
    examples, report = load_examples(get_task("gsm8k"), str(tmp_path / name), "train")
    assert [example.question for example in examples] == [ROWS[0]["question"]]
    assert report.counts == {"question that is no valid text": 1, "no readable row": 1}
