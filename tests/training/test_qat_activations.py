"""Runs with 4-bit activations on the transformers engine: whole weights, and a LoRA on a frozen base."""

import logging

import pytest
from model_folders import with_activations
from small_run import numbers, small_config

from qerl.checkpoint.activations import GRPO_WARNING, read_activations
from qerl.errors import ConfigError, EngineError
from qerl.formats import NVFP4
from qerl.layers import lora
from qerl.nvfp4.activations import Activations
from training.policy.packed_policy import PackedPolicy
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")
QAT = ("qat.mode=weights", "noise.enabled=false", "optim.learning_rate=1e-3")


def agrees(run):
    """Whether trainer and engine agreed at every step, as they would not if one of them left activations in 16 bits."""
    return all(row["mismatch_kl"] < 1e-10 and row["mismatch/max_abs"] < 1e-4 for row in numbers(run))


def test_whole_weights_are_trained_with_activations_that_both_sides_round(base, tmp_path, caplog):
    config = small_config(base, tmp_path, *QAT, "qat.quant_cfg=nvfp4_w4a4", steps=2)
    with caplog.at_level(logging.WARNING):
        run = start(config, "w4a4").run_dir
    assert agrees(run)
    assert caplog.messages.count(GRPO_WARNING) == 1
    for folder in (run / "base", run / "model"):
        assert set(read_activations(folder, NVFP4).values()) == {Activations()}


def test_a_lora_on_a_base_with_activations(nvfp4_base, tmp_path):
    folder = with_activations(nvfp4_base, "static", tmp_path / "w4a4")
    assert agrees(start(small_config(folder, tmp_path, "noise.enabled=false", steps=2), "lora").run_dir)
    with pytest.raises(ConfigError, match=r"adapter.dropout: 0.1 does not go with .*w4a4"):
        start(small_config(folder, tmp_path, "adapter.dropout=0.1", out="other"), "lora")


def test_one_side_with_16_bit_activations_is_stopped_by_the_mismatch(base, tmp_path, monkeypatch):
    """Otherwise the other tests would not show that both sides round."""
    original, rounds = PackedPolicy.logprobs, lora.input_of

    def logprobs(*given):
        lora.input_of = lambda x, parts: x
        try:
            return original(*given)
        finally:
            lora.input_of = rounds

    monkeypatch.setattr(PackedPolicy, "logprobs", logprobs)
    config = small_config(base, tmp_path, *QAT, "qat.quant_cfg=nvfp4_w4a4", steps=1)
    with pytest.raises(EngineError, match=r"disagree before the first update: mismatch_kl .*e-02 is above"):
        start(config, "w4a4")
