"""Functions that a program gives, called in its own process."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from qerl.base.errors import ConfigError, RewardError
from qerl.base.isolate import ReturnedError
from qerl.base.own_function import LateError, OwnFunctionError
from qerl.base.program import GivenFunction, given, given_function, given_rows, source_of, write_given_rows
from qerl.data.tasks import Example, get_task
from tests.helpers.built_rewards import build_rewards
from training.rewards.rewards import FAILED, fixed_columns
from training.run_dir.inputs import inputs_of


def lengths(completions, scale=1):
    return [scale * len(text) for text in completions]


async def later(completions):
    await asyncio.sleep(0)
    return [1.0 for _ in completions]


def one(completion, answer):
    return completion == answer


COLUMNS = {"completions": ["a", "bb"]}


def test_a_given_function_is_called_as_an_own_one():
    assert GivenFunction("lengths", lengths)(2, 1.0, {"scale": 3}, **COLUMNS) == [3.0, 6.0]
    assert GivenFunction("later", later)(2, 1.0, {}, **COLUMNS) == [1.0, 1.0]
    alone = GivenFunction("one", one)
    assert alone(2, 1.0, {}, **COLUMNS, answer=["a", "b"]) == [1.0, 0.0]
    assert list(inspect.signature(alone).parameters) == ["completions", "answer"]


def test_a_coroutine_is_awaited_where_a_loop_runs_already():
    async def notebook():
        return GivenFunction("later", later)(2, 1.0, {}, **COLUMNS)

    assert asyncio.run(notebook()) == [1.0, 1.0]


def test_a_given_function_changes_no_rows_and_no_random_numbers():
    def greedy(completion_ids, step):
        drawn = random.random(), torch.rand(()).item()
        for ids in completion_ids:
            ids.clear()
        return drawn

    ids, states = [[1], [2]], (random.getstate(), torch.get_rng_state())
    function = GivenFunction("greedy", greedy)
    first, second = (function(2, 1.0, {"step": 1}, completion_ids=ids) for _ in range(2))
    assert first == second != function(2, 1.0, {"step": 2}, completion_ids=ids)
    assert ids == [[1], [2]]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_what_a_given_function_does_wrong_is_said():
    with pytest.raises(OwnFunctionError, match="raised ZeroDivisionError: division by zero") as raised:
        GivenFunction("bad", lambda completion: 1 / len(completion))(2, 1.0, {}, completions=["a", ""])
    assert raised.value.index == 1
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(ReturnedError, match="returned 1 values"):
        GivenFunction("few", lambda completions: [1])(2, 1.0, {}, **COLUMNS)
    with pytest.raises(ConfigError, match="cannot grade"):
        GivenFunction("type", type)


def test_a_given_function_leaves_the_process_as_it_was(tmp_path, caplog):
    rows = [{"seen": [1]}, {"seen": [2]}]

    def careless(completions, extra):
        os.chdir(tmp_path)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        for row in extra:
            row["seen"].append(len(row["seen"]))
        return [len(row["seen"]) for row in extra]

    before = os.getcwd()
    function = GivenFunction("careless", careless)
    assert [function(2, 9.0, {}, **COLUMNS, extra=rows) for _ in range(2)] == [[2.0, 2.0]] * 2
    assert rows == [{"seen": [1]}, {"seen": [2]}]
    assert (os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype()) == (before, True, torch.float32)
    assert "python:careless changed the working directory" in caplog.text


def loops(completions):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


async def sleeps(completions):
    await asyncio.sleep(60)


@pytest.mark.parametrize("function", [loops, sleeps, lambda completions: time.sleep(60)])
def test_a_given_function_has_its_time(function):
    alarms = []
    before = signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30)
        with pytest.raises(LateError, match=r"did not return within 0\.1 s"):
            GivenFunction("late", function)(2, 0.1, {}, **COLUMNS)
        assert 20 < signal.getitimer(signal.ITIMER_REAL)[0] < 30, "the program's own alarm goes on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not alarms


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, also where the tests were started in the background, which leaves it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
@pytest.mark.usefixtures("interruptible")
def test_a_given_function_does_not_end_the_program(error):
    def raises(completions):
        raise error

    with pytest.raises(OwnFunctionError, match=f"raised {type(error).__name__}"):
        GivenFunction("raises", raises)(2, 9.0, {}, **COLUMNS)
    with pytest.raises(KeyboardInterrupt):
        GivenFunction("stopped", lambda completions: signal.raise_signal(signal.SIGINT))(2, 9.0, {}, **COLUMNS)


def rewards(name, folder):
    config = type("Reward", (), {"name": name, "weight": 1.0, "args": {}, "timeout_s": None})()
    fixed = fixed_columns(get_task("own"), 8)
    return build_rewards([config], fixed, [Example("q", "b", "1")], folder), config


def test_a_recipe_names_a_given_function(tmp_path):
    with given({"one": one}, {}):
        built, config = rewards("python:one", tmp_path)
        columns = {"row": [0], "completion_ids": [[1]], "prompts": ["q"]}
        assert built.names == ["one"]
        assert built.functions[0](["b"], **columns) == [1.0]
        before = inputs_of([], get_task("own"), [config])
    with given({"one": lambda completion: 1 / 0}, {}):
        built, config = rewards("python:one", tmp_path)
        with pytest.raises(RewardError, match="reward one raised ZeroDivisionError"):
            built.functions[0](["b"], **columns)
        assert inputs_of([], get_task("own"), [config]) != before
    assert (tmp_path / FAILED).is_file()
    with pytest.raises(ConfigError, match=r"go on there, with qerl.train\(resume=RUN, reward=one\)"):
        given_function("reward", "one")


def test_given_rows_are_written_into_their_folder_alone_and_may_hold_half_a_character(tmp_path):
    rows = [{"prompt": "é", "note": "\ud800"}, {"prompt": "é"}]
    with given({}, {str(tmp_path / "rows.jsonl"): rows, "python:data": [{"prompt": "b"}]}):
        assert given_rows("python:data") == [{"prompt": "b"}]
        write_given_rows(tmp_path)
    assert given_rows("python:data") is None
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert "é" in lines[1]


def test_a_function_without_a_text_is_known_by_what_it_does():
    """As one that is written at a prompt or in `python -c`; a run that resumes in another process has to know it."""
    lines = {
        "names": "def f(completions): return [len(text) for text in completions]",
        "other": "def f(completions): return [min(text) for text in completions]",
        "consts": "def f(completions): return [len(text) + 1 for text in completions]",
        "set": "def f(completions): return [text in {'a', 'b', 'c', 'd'} for text in completions]",
    }
    program = "import sys, json; from qerl.base.program import source_of; made = {}\n"
    program += (
        f"for name, line in {lines!r}.items(): exec(line, space := {{}}); made[name] = source_of(space['f']).hex()\n"
    )
    program += "print(json.dumps(made))"
    found = []
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found.append(json.loads(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True).stdout))
    assert found[0] == found[1]
    assert len({*found[0].values()}) == len(lines)


def test_a_partial_and_an_object_are_known_by_what_they_call():
    def first(completions, by=1):
        return [by for _ in completions]

    def second(completions, by=1):
        return [-by for _ in completions]

    partials = [functools.partial(first), functools.partial(first, by=2), functools.partial(second)]
    objects = [type("Reward", (), {"__call__": each})() for each in (first, second)]
    assert len({source_of(each) for each in (*partials, *objects)}) == 5


def test_a_class_is_known_by_its_methods_and_not_by_its_name():
    def made(step, most=3):
        return type("Env", (), {"step": step, "most": most})

    def first(self, action):
        return action, 1.0, True

    def second(self, action):
        return action, 2.0, True

    assert source_of(made(first)) == source_of(made(first))
    assert len({source_of(made(first)), source_of(made(second)), source_of(made(first, 4))}) == 3

    class Env:
        def step(self, action):
            return action, 1.0, True

    before = source_of(Env)

    class Env:
        def step(self, action):
            return action, 2.0, True

    assert source_of(Env) != before
