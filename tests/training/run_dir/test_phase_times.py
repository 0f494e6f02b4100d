"""Seconds by phase: each second counts for the phase that spent it, and all together make the step.

The tests that need a card last ran on an H200 on 2026-11-22.
"""

import gc
import time
from collections import Counter

import pytest
import torch

import qerl.model.packed_attention
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers.small_run import small_config
from training.rewards.grading import Grader
from training.run import opened_set_aside, start
from training.run_dir.log import read_metrics
from training.run_dir.phase_times import PhaseTimes

NAMES = ("rollout", "switch", "sync", "reward", "forward", "backward", "optimizer", "other")
PARTS = {f"time/{name}_s" for name in NAMES}
NO_TRIAL = "loss.mismatch_gate=null"  # the slow functions are counted from the first step on
TICK = 1e-6  # seconds that each reading of the clock takes
SLOW = {  # functions that are made to take seconds: (owner, name, seconds)
    "rollout": (TransformersEngine, "generate", 1),
    "sync": (TransformersEngine, "sync", 2),
    "reward": (Grader, "grade", 4),
    "attention": (qerl.model.packed_attention, "attend_each", 8),
    "optimizer": (torch.optim.AdamW, "step", 16),
    "wake": (TransformersEngine, "wake", 32),
    "sleep": (TransformersEngine, "sleep", 64),
}


class Clock:
    """A clock that advances only in the slow functions."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, Counter()
        for name, (owner, method, seconds) in SLOW.items():
            monkeypatch.setattr(owner, method, self._slow(name, getattr(owner, method), seconds))
        monkeypatch.setattr(time, "perf_counter", self._read)

    def _read(self):
        self.now += TICK
        return self.now

    def _slow(self, name, method, seconds):
        def call(*args, **kwargs):
            self.now += seconds
            self.calls[name] += 1
            return method(*args, **kwargs)

        return call


def check_sum(row):
    parts = {key: row[key] for key in row if key in PARTS}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(row["time/step_s"])
    return parts


@pytest.mark.parametrize("recompute", [False, True])
def test_a_slow_function_counts_only_for_its_phase(nvfp4_base, tmp_path, monkeypatch, recompute):
    clock = Clock(monkeypatch)
    settings = (f"run.gradient_checkpointing={str(recompute).lower()}", "noise.enabled=false")
    settings += ("loss.entropy_coef=0.01", NO_TRIAL)  # so that every row has a loss
    (row,) = read_metrics(start(small_config(nvfp4_base, tmp_path, *settings, steps=1), "tiny").run_dir)
    passes = clock.calls["attention"] // (2 if recompute else 1)
    assert passes > 4  # several layers and micro-batches
    expected = {"rollout": 1, "sync": 2, "reward": 4, "forward": 8 * passes, "backward": 8 * passes * recompute}
    expected |= {"optimizer": 16, "switch": 32 + 64, "other": 0}
    assert check_sum(row) == {f"time/{name}_s": pytest.approx(s, abs=0.1) for name, s in expected.items()}
    assert row["time/train_s"] == pytest.approx(8 * clock.calls["attention"], abs=0.1)


def test_a_pass_without_gradient_is_forward_and_a_further_update_has_no_rollout(nvfp4_base, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    config = small_config(nvfp4_base, tmp_path, "loss.num_iterations=2", "noise.enabled=false", NO_TRIAL, steps=2)
    first, second = read_metrics(start(config, "tiny").run_dir)
    assert set(check_sum(first)) == PARTS
    assert PARTS - set(check_sum(second)) == {"time/rollout_s", "time/switch_s", "time/sync_s", "time/reward_s"}
    assert second["time/forward_s"] > 8
    assert first["time/forward_s"] > 1.5 * second["time/forward_s"]  # includes the old logprobs
    total = first["time/forward_s"] + second["time/forward_s"]
    assert total == pytest.approx(8 * clock.calls["attention"], abs=0.1)


def test_phases_add_up_to_values_by_hand_and_a_new_step_has_none(monkeypatch):
    clock = iter([10.0, 11.0, 13.0, 14.0, 14.5, 15.0, 19.0, 20.0, 30.0, 31.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = PhaseTimes(torch.device("cpu"))  # the clock is at 10
    for name in ("forward", "backward", "forward"):
        with times.phase(name):
            pass
    parts = {"time/forward_s": 2.0 + 4.0, "time/backward_s": 0.5, "time/other_s": 10.0 - 6.0 - 0.5 - 1.25}
    assert times.metrics(1.25) == parts | {"time/step_s": 10.0}
    times.begin_step()
    assert times.metrics(0.0) == {"time/step_s": 1.0, "time/other_s": 1.0}


def test_collecting_garbage_in_a_run_leaves_out_what_was_there_before(runs_set_aside):
    kept = [{}]
    with opened_set_aside():
        new = [{}]
        seen = gc.get_objects()
        assert any(each is new for each in seen)
        assert not any(each is kept for each in seen)
    assert any(each is kept for each in gc.get_objects())


@pytest.mark.gpu
def test_phases_of_a_gpu_are_timed_in_its_queue_without_waiting():
    """Work is queued in microseconds and timed where it is done; only reading the times waits."""
    torch.cuda._sleep(1)  # so that its kernel is loaded
    torch.cuda.synchronize()
    times, began = PhaseTimes(torch.device("cuda")), time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, cycles in (("forward", 10**8), ("backward", 3 * 10**8), ("forward", 10**8)):
            with times.phase(name):
                torch.cuda._sleep(cycles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    queued_s = time.perf_counter() - began
    torch.cuda.synchronize()
    metrics = times.metrics(0.0)
    assert metrics["time/forward_s"] > 10 * queued_s
    assert metrics["time/backward_s"] == pytest.approx(1.5 * metrics["time/forward_s"], rel=0.2)
    assert metrics["time/other_s"] >= -1e-3  # measured by two clocks
    names = ("time/forward_s", "time/backward_s", "time/other_s")
    assert sum(metrics[name] for name in names) == pytest.approx(metrics["time/step_s"])
