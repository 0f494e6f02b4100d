"""Runs whose engine keeps keys and values in 8 bits: the policy rounds them as its engine does."""

import json

import pytest

import qerl.model.packed_attention
from qerl.base.errors import EngineError
from qerl.engine.interface import SamplingParams
from qerl.engine.options import EngineOptions
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers.small_run import numbers, small_config
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("rollout.kv_cache_dtype=fp8", "noise.enabled=false", "loss.mismatch_gate=null")


def mismatches(run_dir):
    return [row["mismatch_kl"] for row in numbers(run_dir)]


def test_policy_and_engine_agree_since_both_round(nvfp4_base, tmp_path, monkeypatch):
    """If the trainer attends in full precision, its policy is another one than its engine's."""
    start(small_config(nvfp4_base, tmp_path, *SETTINGS, steps=1, out="both"), "x")
    assert max(mismatches(tmp_path / "both")) < 1e-7
    monkeypatch.setattr(qerl.model.packed_attention, "rounded_kv", lambda module, key, value: (key, value))
    start(small_config(nvfp4_base, tmp_path, *SETTINGS, steps=1, out="engine"), "x")
    assert min(mismatches(tmp_path / "engine")) > 1e-6


def test_a_resumed_run_has_the_numbers_of_one_that_went_on(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr("training.policy.kv_ranges.KV_REFRESH", 2)
    start(small_config(nvfp4_base, tmp_path, *SETTINGS, "run.save_every=1", steps=3, out="whole"), "x")
    whole, begun = tmp_path / "whole", numbers(tmp_path / "whole")
    saved = [json.loads((folder / "kv_scales.json").read_text()) for folder in checkpoints(whole)]
    assert [each["step"] for each in saved] == [0, 2]  # of the checkpoints 2 and 3
    resume(whole, step=2)
    assert numbers(whole) == begun


def test_an_engine_that_is_not_calibrated_does_not_sample(nvfp4_base):
    options = EngineOptions(kv_cache_dtype="fp8", dtype="float32")
    engine = TransformersEngine(str(nvfp4_base), "nvfp4", options)
    with pytest.raises(EngineError, match="no scales yet"):
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))
    with pytest.raises(EngineError, match=r"write rollout\.kv_cache_dtype: fp8, or auto"):
        TransformersEngine(str(nvfp4_base), "nvfp4", EngineOptions(kv_cache_dtype="fp8_per_token_head"))
    with pytest.raises(EngineError, match="open it with kv_cache_dtype fp8"):
        TransformersEngine(str(nvfp4_base), "nvfp4", EngineOptions()).set_kv_scales({})
