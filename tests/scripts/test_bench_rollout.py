"""How scripts/bench/bench_rollout.py sets up an engine before it measures; the rest needs a card."""

import argparse
import json
import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import bench_rollout
import pytest
from transformers import AutoConfig

from qerl.plan.sizes import read_sizes


@pytest.mark.parametrize("new_tokens", [129, 31, 15])
def test_the_cache_fits_every_sequence_at_full_length_and_little_more(tmp_path, new_tokens):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(tmp_path)
    asked = {"prompt_tokens": 128, "new_tokens": new_tokens, "sequences": [1, 256]}
    per_token = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, width, bytes
    tokens = bench_rollout.cache_bytes(argparse.Namespace(**asked), read_sizes(str(tmp_path))) / per_token
    blocks_of_one = -(-(128 + new_tokens + 1) // 16)
    assert tokens >= 256 * 16 * blocks_of_one
    assert tokens < 256 * 16 * (blocks_of_one + 1)


def test_a_cache_in_which_sequences_would_wait_for_others_is_refused():
    """A 27B with linear attention: a sequence of 257 tokens takes four blocks of 784, three of them for its states."""
    each = read_sizes("Qwen/Qwen3.5-27B").cached_tokens(257)
    assert each == 4 * 784
    bench_rollout.check_cache(128 * each, 128 * each)
    with pytest.raises(RuntimeError, match="holds 398272 tokens and 401408 are to be sampled at once"):
        bench_rollout.check_cache(127 * each, 128 * each)


def engine(folder: Path, name: str) -> None:
    """Sample a token per second by the clock that is measured with, and record when by the machine's."""
    times, clock = [], [0.0]

    def generate(prompts, new_tokens):
        started = time.monotonic()
        time.sleep(0.002)
        clock[0] += new_tokens
        times.append((started, time.monotonic()))
        return len(prompts) * new_tokens

    time.perf_counter = lambda: clock[0]
    asked = {"turns": folder / "turns", "of": 2, "sequences": [1, 4], "prompt_tokens": 2, "new_tokens": 11}
    asked |= {"rounds": bench_rollout.ROUNDS, "cached_prompts": False}
    seconds = bench_rollout.measure(generate, argparse.Namespace(**asked))
    (folder / f"{name}.json").write_text(json.dumps({"times": times, "seconds": [seconds[count] for count in (1, 4)]}))


def test_engines_in_turns_alternate_and_never_run_at_the_same_time(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=engine, args=(tmp_path, name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    runs = sorted([(*times, "a") for times in first["times"]] + [(*times, "b") for times in second["times"]])
    assert all(ended <= started for (_, ended, _), (started, _, _) in pairwise(runs))
    assert sum(one != other for (_, _, one), (_, _, other) in pairwise(runs)) >= 2 * bench_rollout.ROUNDS
    runs = [run for rounds in first["seconds"] for run in rounds]
    assert len(runs) == 2 * bench_rollout.ROUNDS
    assert set(map(tuple, runs)) == {(1.0, 11.0)}  # seconds for one token, and for all


def failing(folder: Path, open_only: bool = False) -> None:
    asked = argparse.Namespace(turns=folder / "turns", sequences=[1, 4], open_only=open_only)
    with bench_rollout.turns_left_to_others(asked):
        raise RuntimeError("no memory is left")


def killed(folder: Path, runs: int) -> None:
    """An engine that is killed after `runs` runs, or while it opens if that is 0, and so cannot say that it failed."""
    asked = {"turns": folder / "turns", "of": 2, "sequences": [1, 4], "prompt_tokens": 2, "new_tokens": 11}
    asked |= {"rounds": bench_rollout.ROUNDS, "cached_prompts": False}
    arguments, done = argparse.Namespace(**asked, open_only=False), []

    def generate(prompts, new_tokens):
        done.append(new_tokens)
        if len(done) > runs:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(prompts) * new_tokens

    with bench_rollout.turns_left_to_others(arguments):
        if not runs:
            os.kill(os.getpid(), signal.SIGKILL)
        bench_rollout.measure(generate, arguments)


@pytest.mark.parametrize("runs", [0, 8])
def test_the_others_do_not_wait_for_an_engine_that_is_killed(tmp_path, runs):
    context = multiprocessing.get_context("fork")
    jobs = (killed, (tmp_path, runs)), (engine, (tmp_path, "a"))
    gone, other = (context.Process(target=job, args=arguments, daemon=True) for job, arguments in jobs)
    for process in (gone, other):
        process.start()
    for process in (gone, other):
        process.join(60)
    assert [gone.exitcode, other.exitcode] == [-signal.SIGKILL, 0]
    rounds = json.loads((tmp_path / "a.json").read_text())["seconds"]
    assert [len(runs) for runs in rounds] == [bench_rollout.ROUNDS] * 2


def test_an_engine_that_fails_to_compile_alone_is_not_counted_among_those_that_measure(tmp_path):
    """If it were counted, the others would begin while one of them is still opening."""
    with pytest.raises(RuntimeError, match="no memory"):
        failing(tmp_path, open_only=True)
    assert not (tmp_path / "turns").exists()


def test_a_run_that_is_cut_off_leaves_the_rounds_that_it_had(tmp_path, monkeypatch):
    clock, calls = [0.0], []

    def generate(prompts, new_tokens):
        clock[0] += 0.5 + len(prompts) * new_tokens / 100
        calls.append(new_tokens)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return len(prompts) * new_tokens

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bench_rollout, "open_qerl", lambda arguments: (generate, {"cache_tokens": 10**6}))
    asked = {"engine": "qerl", "open_only": False, "turns": None, "of": 1, "sequences": [4], "prompt_tokens": 5}
    asked |= {"new_tokens": 11, "rounds": 5, "cached_prompts": True, "out": tmp_path / "r.json"}
    with pytest.raises(KeyboardInterrupt):
        bench_rollout.measured(argparse.Namespace(**asked))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["runs_s"]["4"] == [[0.54, 0.94]] * 3
    assert report["decode_tokens_per_s"] == {"4": 100.0}  # 40 tokens in 0.4 s
