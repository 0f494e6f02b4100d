"""The gate before the first update: what it refuses, what it cannot judge, and what it says."""

import math

import pytest
import torch

from qerl.config.recipe import load_recipe
from qerl.config.schema import CorrectionConfig
from qerl.errors import EngineError
from training.loss.correction import Mismatch
from training.loss.mismatch_gate import MismatchGate, rounding_causes


def apart(difference):
    """A step whose tokens all differ by `difference` nats."""
    mismatch = Mismatch()
    mismatch.add(torch.zeros(1, 3), torch.full((1, 3), -difference), torch.ones(1, 3), CorrectionConfig())
    return mismatch


@pytest.mark.parametrize(
    ("overrides", "causes"),
    [
        ((), []),
        (("qat.mode=weights",), []),
        (("qat.mode=weights", "qat.forward=masters"), ["qat.forward: masters"]),
        (
            ("qat.quant_cfg=nvfp4_w4a4", "rollout.kv_cache_dtype=fp8"),
            ["qat.quant_cfg.activations: dynamic", "rollout.kv_cache_dtype: fp8"],
        ),
        (("train.fp8_recipe=blockwise",), ["train.fp8_recipe: blockwise"]),
        (("train.fp8_recipe=blockwise", "train.fp8_products=gradients"), []),
    ],
)
def test_a_gate_names_the_keys_that_make_the_two_differ(overrides, causes):
    found = rounding_causes(load_recipe("tiny", [*overrides, "noise.enabled=false", "rollout.engine=vllm"]))
    assert found == causes
    with pytest.raises(EngineError) as refused:
        MismatchGate(0.003, 0.0, found).check(apart(0.5), sigma=0.0)
    said = str(refused.value)
    assert all(cause in said for cause in causes)
    assert ("leave it out" in said) == bool(causes)
    assert ("both loaded the same base" in said) == (not causes)


def test_the_gate_waits_for_a_step_with_tokens():
    """If all completions of the first step are truncated and masked, it says nothing about the agreement."""
    gate = MismatchGate(0.003, dropout=0.0)
    gate.check(Mismatch(), sigma=0.0)
    assert not gate.passed
    with pytest.raises(EngineError, match=r"mismatch_kl 1\.49e-01 is above loss\.mismatch_gate 0\.003"):
        gate.check(apart(0.5), sigma=0.0)
    gate.check(apart(0.0), sigma=0.0)
    gate.check(apart(0.5), sigma=0.0)  # it judges only the first update
    MismatchGate(None, dropout=0.0).check(apart(0.5), sigma=0.0)
    with pytest.raises(EngineError, match="mismatch_kl nan"):
        MismatchGate(0.003, dropout=0.0).check(apart(math.nan), sigma=0.0)


@pytest.mark.parametrize(
    ("sigma", "dropout", "reason"), [(0.01, 0.0, "its noise (sigma 0.01)"), (0, 0.2, "dropout (0.2)")]
)
def test_a_gate_that_cannot_judge_says_so_once(caplog, sigma, dropout, reason):
    gate = MismatchGate(0.003, dropout)
    for _ in range(3):
        gate.check(apart(0.5), sigma)
    (record,) = caplog.records
    assert reason in record.message
    assert "loss.mismatch_gate is not checked" in record.message


HISTORY = [
    {"noise/sigma": 0.0, "mismatch_kl": 1e-4},
    {"noise/sigma": 0.02, "mismatch_kl": 4e-2},
    {"noise/sigma": 0.01, "mismatch_kl": 8e-3},
    {"noise/sigma": 0.01, "mismatch_kl": 1e-2},
    {"noise/sigma": 0.01},  # no tokens in the loss
]


def test_a_run_resumed_under_noise_is_judged_by_its_history():
    """0.149 is compared with 5 times 1e-2, the largest value with sigma 0.01. That with 0.02 would let it pass."""
    with pytest.raises(EngineError, match=r"mismatch_kl 1\.49e-01 is above 5 times what the run had"):
        MismatchGate(0.003, dropout=0.0).check(apart(0.5), 0.01, HISTORY)
    with pytest.raises(EngineError, match="5 times"):
        MismatchGate(0.003, dropout=0.0).check(apart(0.5), 0.005, HISTORY)
    gate = MismatchGate(0.003, dropout=0.0)
    gate.check(apart(0.25), 0.01, HISTORY)  # 3.4e-2
    assert gate.passed
    with pytest.raises(EngineError, match=r"above loss\.mismatch_gate 0\.003"):  # almost none with noise in both
        MismatchGate(0.003, dropout=0.0).check(apart(0.5), 0.01, [{"noise/sigma": 0.01, "mismatch_kl": 1e-12}])


@pytest.mark.parametrize(("sigma", "dropout"), [(0.03, 0.0), (0.01, 0.1)])
def test_a_run_without_such_a_step_cannot_be_judged(caplog, sigma, dropout):
    gate = MismatchGate(0.003, dropout)
    gate.check(apart(0.5), sigma, HISTORY)
    gate.check(apart(0.5), sigma, [*HISTORY, {"noise/sigma": sigma, "mismatch_kl": 1e-3}])
    assert "loss.mismatch_gate is not checked" in caplog.text
    assert not gate.passed
