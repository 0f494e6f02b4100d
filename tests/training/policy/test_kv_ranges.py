"""Calibration of 8-bit keys and values: what is measured, which scales follow, and when it is done again."""

import math

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.checkpoint.load import load_model
from qerl.formats.fp8.kv import KVScales, Ranges, scales_of
from qerl.model.packed_attention import attention_modules, set_kv_scales_
from training.policy.kv_ranges import KVCalibration, measured

ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


class Engine:
    def __init__(self):
        self.seen = []

    def set_kv_scales(self, scales):
        self.seen.append(scales)
        return len(scales)


def test_a_scale_is_a_power_of_two_with_a_bit_of_head_room():
    found = scales_of({0: Ranges(448.0, 449.0, 3.0), 7: Ranges(0.0, 1e4, 112.0)})
    assert found[0] == KVScales(2.0, 4.0, 2**-6)
    assert found[7].value == 0.5
    assert found[7].key == 64.0
    assert all(math.frexp(value)[0] == 0.5 for value in (found[7].query, found[7].key))
    with pytest.raises(EngineError, match="layer 3 are not finite"):
        scales_of({3: Ranges(1.0, math.nan, 1.0)})


def test_ranges_are_those_of_what_attention_gets(base):
    """Values are what v_proj gives; keys are measured after their norm and rotation, which keeps each pair's length."""
    model = load_model(base, "bf16", "float32").train()
    values, config = [], model.config._attn_implementation
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(3)
    found = measured(model, ROWS)
    assert sorted(found) == [0, 1]
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: values.append(module.v_proj(kwargs["hidden_states"]).abs().max()), with_kwargs=True
    )
    with torch.no_grad():
        for ids in ROWS:
            model(torch.tensor([ids]))
    assert found[1].value == pytest.approx(max(values).item(), rel=1e-5)
    norm = model.model.layers[0].self_attn.k_norm.weight.abs().max().item()
    assert 0 < found[0].key <= norm * 16**0.5 * 2**0.5
    assert (model.training, model.config._attn_implementation) == (True, config)


def test_policy_and_engine_are_calibrated_first_and_again_when_that_is_due_and_something_moved(base):
    model, engine = load_model(base, "bf16", "float32"), Engine()
    calibration = KVCalibration(model, ROWS, refresh=2)
    assert calibration.after_sync(engine, 4)
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(8)
    assert not calibration.after_sync(engine, 4)  # a validation before the step has synced already
    assert not calibration.after_sync(engine, 5)  # not due
    assert calibration.after_sync(engine, 6)
    before, after = engine.seen
    assert after[1].value == 8 * before[1].value
    assert after[0] == before[0]
    assert {layer: module.kv_scales for layer, module in attention_modules(model).items()} == after
    assert [calibration.after_sync(engine, step) for step in range(7, 11)] == [False] * 4  # nothing has moved


def test_what_goes_on_from_a_checkpoint_has_its_scales_and_calibrates_when_the_other_would_have(base, tmp_path):
    model, engine = load_model(base, "bf16", "float32"), Engine()
    first = KVCalibration(model, ROWS, refresh=3)
    first.after_sync(engine, 0)
    first.save(tmp_path)
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(8)
    other = KVCalibration(model, ROWS, refresh=3)
    other.load(tmp_path)
    assert other.after_sync(engine, 2)
    assert engine.seen[1] == engine.seen[0]
    assert other.after_sync(engine, 3)
    assert engine.seen[2][1].value == 8 * engine.seen[0][1].value


def test_all_ranks_take_the_scales_of_the_first_one(base):
    class Second:
        first = False

        def broadcast(self, value):
            assert value == {}
            return sent

    model, engine = load_model(base, "bf16", "float32"), Engine()
    sent = {layer: KVScales(1.0, 0.5, 0.25) for layer in (0, 1)}
    assert KVCalibration(model, ROWS, 1, Second()).after_sync(engine, 0)
    assert engine.seen == [sent]
    with pytest.raises(EngineError, match="are for 1 layers, and the model attends in 2"):
        set_kv_scales_(model, {0: KVScales(1.0, 1.0, 1.0)})
