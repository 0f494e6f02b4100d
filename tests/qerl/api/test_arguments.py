"""Functions and rows as a program gives them."""

import functools
import inspect
import itertools
import threading
from datetime import date
from pathlib import Path

import datasets
import numpy
import pandas
import pytest

import qerl
from qerl.api import training
from qerl.api.arguments import Functions, grader_of, one_at_a_time, plain_rows, rewards_of, typed
from qerl.base.errors import ConfigError, DataError
from quantize.export.options import ExportOptions
from quantize.options import QuantizeOptions

ROWS = [
    {"prompt": "a", "answer": "1", "level": 3, "tags": ["x"]},
    {"prompt": "b", "answer": "2", "level": 4, "tags": []},
]


def short(completions):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        (dict(row) for row in ROWS),
        datasets.Dataset.from_list(ROWS),
        pandas.DataFrame(ROWS),
        [{**row, "level": numpy.int64(row["level"]), "tags": numpy.array(row["tags"])} for row in ROWS],
    ],
    ids=["list", "generator", "datasets", "pandas", "numpy"],
)
def test_rows_of_any_table_become_those_of_a_jsonl_file(data):
    assert plain_rows(data) == ROWS


def test_an_empty_cell_of_a_table_is_none():
    table = pandas.DataFrame([{"prompt": "a", "level": 1, "at": "x"}, {"prompt": "b"}])
    table["day"], table["known"] = pandas.to_datetime([None, None]), pandas.array([True, None], dtype="boolean")
    first, second = plain_rows(table)
    assert first == {"prompt": "a", "level": 1, "at": "x", "day": None, "known": True}
    assert second == {"prompt": "b", "level": None, "at": None, "day": None, "known": None}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "data holds no rows"),
        ([1], "row 1 of data is 1: give mappings"),
        ([ROWS[0], {"prompt": date(2026, 1, 1)}], "row 2 of data cannot be kept as JSON (it holds a value of the type"),
        ([{"prompt": "a", "level": float("nan")}], "row 1 of data cannot be kept as JSON"),
        (3, "data is 3: give a list of mappings"),
    ],
)
def test_what_is_no_table_is_one_line(data, line):
    with pytest.raises(DataError) as refused:
        plain_rows(data)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rewards_are_named_by_their_functions():
    functions = Functions()
    partial = functools.partial(short)
    given = [short, "accuracy", {"name": short, "weight": 0.5, "args": {}}]
    assert rewards_of(given, functions) == [
        {"name": "python:short"},
        {"name": "accuracy"},
        {"name": "python:short", "weight": 0.5, "args": {}},
    ]
    assert rewards_of(lambda completions: [], functions) == [{"name": "python:reward"}]
    assert functions["short"] is short
    with pytest.raises(ConfigError, match="two functions are called 'short'"):
        rewards_of(partial, functions)
    for wrong in (3, {"weight": 1.0}, {"name": 3}, None):
        with pytest.raises(ConfigError, match=r"reward=.* is no reward: give a function"):
            rewards_of([wrong], functions)
    with pytest.raises(ConfigError, match=r"grader=3 is not a grader: give a function"):
        grader_of(3, functions)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: qerl.evaluate("arith", "tiny", limit="three"), "qerl.evaluate: limit is 'three': it should be"),
        (lambda: qerl.evaluate("arith", "tiny", samples=None), "qerl.evaluate: samples is None: it should be"),
        (lambda: qerl.evaluate("arith", "tiny", pass_k="1,4"), "qerl.evaluate: pass_k is '1,4': it should be"),
        (lambda: qerl.evaluate("arith", "tiny", columns=["a"]), "qerl.evaluate: columns is ['a']: it should be"),
        (lambda: qerl.quantize("tiny", ignore="lm_head"), "qerl.quantize: ignore is 'lm_head': it should be"),
        (lambda: qerl.export("tiny", step="last"), "qerl.export: step is 'last': it should be"),
        (lambda: qerl.merge("tiny", 3), "qerl.merge: to is 3: it should be"),
        (lambda: qerl.train(resume="runs/x", steps="x"), "qerl.train: steps is 'x': it should be"),
        (lambda: qerl.compare(3, "x"), "3 is not an evaluation: give what qerl.evaluate returned"),
    ],
)
def test_a_value_of_another_type_is_one_line(call, line):
    with pytest.raises(ConfigError) as refused:
        call()
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_are_as_the_options_hold_them():
    given = {"ignore": ["a", "b"], "calibration_size": numpy.int64(3), "calibration": Path("rows.jsonl")}
    found = typed(QuantizeOptions, given, "qerl.quantize")
    assert found == {"ignore": ("a", "b"), "calibration_size": 3, "calibration": "rows.jsonl"}
    assert typed(ExportOptions, {"out": "x", "prompts": None}, "") == {"out": Path("x"), "prompts": None}


def test_one_call_at_a_time_has_the_process():
    begun, go_on, said = threading.Event(), threading.Event(), []

    @one_at_a_time
    def train(value):
        begun.set()
        go_on.wait(20)
        return value

    @one_at_a_time
    def evaluate(raises=False):
        if raises:
            raise ValueError("x")
        return 1

    other = threading.Thread(target=lambda: said.append(train(5)))
    other.start()
    begun.wait(20)
    with pytest.raises(ConfigError, match=r"qerl\.evaluate was called while qerl\.train is at work in this process: "):
        evaluate()
    go_on.set()
    other.join()
    with pytest.raises(ValueError, match="x"):
        evaluate(raises=True)
    assert (said, evaluate()) == ([5], 1)
    for name in ("train", "evaluate", "quantize", "merge", "export"):
        assert hasattr(getattr(training, name), "__wrapped__")


def test_rows_without_an_end_are_refused(monkeypatch):
    monkeypatch.setattr("qerl.api.arguments.MOST_ROWS", 1000)
    with pytest.raises(DataError, match="data gives more than 1000 rows and has no length: is there an end"):
        plain_rows({"prompt": str(number)} for number in itertools.count())
    monkeypatch.setattr("qerl.api.arguments.MOST_BYTES", 1000)
    with pytest.raises(DataError, match="has no length"):
        plain_rows({"prompt": "long" * 99} for _ in range(9))
    assert len(plain_rows([{"prompt": "a"}] * 1001)) == 1001
    assert len(plain_rows({"prompt": "a"} for _ in range(9))) == 9


def test_rows_that_nest_or_hold_a_generator_are_refused():
    deep = []
    for _ in range(3000):
        deep = [deep]
    for value in (deep, itertools.count(), (1 for _ in range(3))):
        with pytest.raises(DataError, match="row 1 of data cannot be kept as JSON"):
            plain_rows([{"prompt": value}])


def test_help_shows_each_argument_and_not_that_there_are_some():
    shown = {name: str(inspect.signature(getattr(qerl, name))) for name in ("train", "sft", "distill")}
    shown["generate"] = str(inspect.signature(qerl.Model.generate))
    assert not any("Unpack" in text for text in shown.values())
    for name, field in (("train", "grader"), ("sft", "columns"), ("distill", "teacher"), ("generate", "top_p")):
        assert f"{field}: " in shown[name]
    assert "grader" not in shown["sft"]
    assert shown["train"].endswith("-> 'Run'")
