"""Runs that train in FP8: what the trainer then is to its engine, and what is refused."""

import pytest

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_recipe
from tests.helpers.small_run import numbers, small_config
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = ("model.format=fp8_block", "qat.quant_cfg=fp8_block")
STILL = ("noise.enabled=false", "loss.mismatch_gate=null")


@pytest.mark.parametrize(
    ("overrides", "agrees"),
    [
        (("model.format=bf16", "train.fp8_recipe=tensorwise"), False),
        ((*WEIGHTS, "train.fp8_recipe=blockwise"), True),
        ((*WEIGHTS, "qat.forward=masters"), False),
        ((*WEIGHTS, "qat.forward=masters", "train.fp8_recipe=tensorwise"), True),
        (("qat.mode=weights", "train.fp8_recipe=tensorwise", "train.fp8_products=gradients"), True),
    ],
    ids=["adapter", "weights", "masters", "both", "gradients through NVFP4"],
)
def test_a_run_is_as_far_from_its_engine_as_their_products_are(base, tmp_path, overrides, agrees):
    """Random weights show the rounding to 8 bits as 0.02 to 0.04. Under powers of two one scale rounds as many do."""
    run = start(small_config(base, tmp_path, *STILL, *overrides, steps=2), "fp8").run_dir
    assert numbers(run)[1]["grad_norm"] > 0
    low, high = (0, 1e-6) if agrees else (1e-3, 0.1)
    assert all(low <= row["mismatch_kl"] < high for row in numbers(run))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.fp8=hybrid"], "this key is gone; gradients are e5m2 if train.fp8_recipe is tensorwise"),
        (["train.fp8_products=gradients"], "nothing is rounded; write train.fp8_products: all"),
        (["train.fp8_recipe=tensorwise", "adapter.dropout=0.1"], "write adapter.dropout: 0"),
        (["train.fp8_recipe=tensorwise", "loss.correction.mode=off", *STILL], "has to be corrected for"),
        (["train.fp8_recipe=blockwise", "qat.quant_cfg=nvfp4_w4a4"], "are rounded to 4 bits already"),
        (["train.fp8_recipe=delayed"], "expected one of tensorwise, blockwise"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError) as refused:
        load_recipe("dapo_7b", overrides)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
