"""The gate before the first update (what it refuses, cannot judge and says), and weights that are not finite."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.base.parallel import ALONE
from qerl.config.recipe import load_recipe
from qerl.config.schema import CorrectionConfig
from training.loss.correction import Mismatch
from training.loss.gates import MismatchGate, Trial, check_trained, rounding_causes


def apart(difference):
    """A step whose tokens all differ by `difference` nats."""
    mismatch = Mismatch()
    mismatch.add(torch.zeros(1, 3), torch.full((1, 3), -difference), torch.ones(1, 3), CorrectionConfig())
    return mismatch


CAUSES = ("train.fp8_recipe: blockwise", "rollout.kv_cache_dtype: fp8")


@pytest.mark.parametrize(
    ("overrides", "causes"),
    [
        ((), []),
        (("qat.mode=weights",), []),
        (("qat.mode=weights", "qat.forward=masters"), ["qat.forward: masters"]),
        (("qat.quant_cfg=nvfp4_w4a4",), ["qat.quant_cfg.activations: dynamic"]),
        (("train.fp8_recipe=blockwise", "rollout.kv_cache_dtype=fp8"), [*CAUSES]),
        (("train.fp8_recipe=blockwise_gradients",), []),
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
    (said,) = caplog.messages
    assert reason in said
    assert "loss.mismatch_gate is not checked" in said


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


CHANGE = torch.tensor([0.3, -0.1, 0.2, -0.2], dtype=torch.float64)


def trial_of(share=1.0, offset=0.0, change=CHANGE):
    """A trial whose engine has a share of the trainer's change, and lies `offset` nats apart besides."""
    return Trial(-1 + share * change + offset, -1 + change, torch.full_like(change, -1.0))


def test_a_trial_says_how_much_of_the_change_the_engine_has():
    trial = trial_of(0.25)
    assert trial.moved == pytest.approx(0.2)
    assert trial.share == pytest.approx(0.25)
    apart = 0.75 * CHANGE
    assert trial.mean_kl == pytest.approx((apart.exp() - apart - 1).mean().item())
    spread = (apart.exp() - apart - 1).std(correction=0).item()
    assert trial.least_kl == pytest.approx(trial.mean_kl - spread)  # two standard errors of four tokens
    # With o nats besides, by least squares: share = 1 + o sum(c) / sum(c^2), of which sum(c) = 0.2, sum(c^2) = 0.18.
    assert trial_of(1.0, 0.09).share == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("trial", "limit", "message"),
    [
        (trial_of(1.0), 1e-12, None),
        (trial_of(0.0), 10.0, r"does not act in the engine: .* by 0\.2 nats per token, of which the engine shows 0%"),
        (trial_of(0.49), 10.0, "of which the engine shows 49%"),
        (trial_of(-1.0), 10.0, "of which the engine shows -100%"),
        (trial_of(0.51), 10.0, None),
        (trial_of(0.51), 1e-3, r"disagree under a trial adapter: mismatch_kl 5\.54e-03 is above .*gate 0\.001\. Check"),
        (trial_of(1.0, 0.5), 0.003, r"mismatch_kl 1\.0\de-01 is above"),  # e^-0.5 + 0.5 - 1 is 0.107
        (trial_of(1.0, math.nan), 10.0, "mismatch_kl nan is above"),
    ],
)
def test_a_trial_is_judged_by_what_the_engine_shows(trial, limit, message):
    with pytest.raises(EngineError, match=message) if message else nullcontext():
        MismatchGate(limit, dropout=0.1).check_trial(trial)


def test_few_tokens_that_say_little_do_not_stop_a_run(caplog):
    """One token of sixteen is apart, as happens where both round: the mean is above the limit, but not surely."""
    change = CHANGE.repeat(4)
    rounded = torch.zeros(16, dtype=torch.float64)
    rounded[3] = 0.4
    trial = replace(trial_of(1.0, 0.0, change), engine=-1 + change + rounded)
    assert trial.mean_kl > 0.003 > trial.least_kl
    MismatchGate(0.003, dropout=0.0).check_trial(trial)
    # Nor does an engine that shows less than half of a small change, if as much is noise.
    noisy = replace(trial, engine=-1 + 0.4 * change + torch.linspace(-0.3, 0.3, 16, dtype=torch.float64).roll(5))
    assert noisy.share < 0.5
    assert not noisy.idle
    MismatchGate(0.003, dropout=0.0).check_trial(trial_of(0.0, 0.0, CHANGE / 100))
    assert "whether the engine reads its adapter was not checked" in caplog.text  # it moves nothing


def ranks(other):
    """One of two ranks, where the other one found `other`."""
    return SimpleNamespace(gather=lambda found: [found, other])


@pytest.mark.parametrize(
    ("value", "parallel", "fits"),
    [
        (3e38, ALONE, True),
        (math.nan, ALONE, False),
        (-math.inf, ALONE, False),
        (0.0, ranks(other=True), True),
        (0.0, ranks(other=False), False),
        (None, ranks(other=False), False),  # no masters are this rank's
        (math.inf, ranks(other=True), False),
    ],
)
def test_every_rank_stops(value, parallel, fits):
    weights = [] if value is None else [torch.zeros(2, 3), torch.tensor([[0.0, value]], dtype=torch.bfloat16)]
    said = r"update of step 7 left NaN or infinity .* checkpoint in runs/a$"
    with nullcontext() if fits else pytest.raises(EngineError, match=said):
        check_trained(weights, 7, Path("runs/a"), parallel)
