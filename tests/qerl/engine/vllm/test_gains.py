"""The gains of the engine's norms: trained weights or those of the checkpoint, plus noise on the clean weights."""

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.vllm.gains import Gains

FIRST, LAST = "model.layers.0.input_layernorm", "model.norm"


@pytest.fixture
def norms():
    modules = {}
    for name, value in ((FIRST, 1.5), (LAST, 0.5)):
        modules[name] = torch.nn.Module()
        modules[name].weight = torch.nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))
        modules[name].register_buffer("gain", torch.full((4,), float("nan")))
    return modules


def values(norms):
    return {name: norm.gain.tolist() for name, norm in norms.items()}


def test_noise_below_the_grid_of_bfloat16_acts_and_is_removed_without_a_trace(norms):
    gains = Gains(norms)
    gains.set_noise_({FIRST: torch.full((4,), 2.0**-12)})
    assert values(norms) == {FIRST: [1.5 + 2.0**-12] * 4, LAST: [0.5] * 4}
    gains.set_noise_({LAST: torch.full((4,), 2.0**-12)})  # replaces the earlier noise
    assert values(norms) == {FIRST: [1.5] * 4, LAST: [0.5 + 2.0**-12] * 4}
    gains.set_noise_({})
    assert values(norms) == {FIRST: [1.5] * 4, LAST: [0.5] * 4}
    assert norms[FIRST].weight.dtype == torch.bfloat16


def test_trained_weights_keep_the_noise_and_those_of_the_checkpoint_come_back(norms):
    gains = Gains(norms)
    gains.set_noise_({FIRST: torch.full((4,), 0.25)})
    trained = torch.nn.Parameter(torch.full((4,), 1.0 + 2.0**-12))
    gains.set_trained_({FIRST: trained})
    assert values(norms) == {FIRST: [1.25 + 2.0**-12] * 4, LAST: [0.5] * 4}
    with torch.no_grad():
        trained.add_(1.0)  # the optimizer's next step, which acts after the next sync
    gains.set_noise_({FIRST: torch.full((4,), 0.5)})
    assert values(norms)[FIRST] == [1.5 + 2.0**-12] * 4
    gains.set_trained_({FIRST: trained})
    assert values(norms)[FIRST] == [2.5 + 2.0**-12] * 4
    gains.set_trained_({})
    assert values(norms)[FIRST] == [2.0] * 4


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ({"model.layers.9.input_layernorm": torch.zeros(4)}, "does not have: .'model.layers.9.input_layernorm'"),
        ({FIRST: torch.zeros(5)}, r"has shape \(5,\), not \(4,\)"),
    ],
)
def test_noise_that_does_not_fit_is_refused_and_changes_nothing(norms, noise, message):
    gains = Gains(norms)
    gains.set_noise_({FIRST: torch.full((4,), 0.25)})
    with pytest.raises(EngineError, match=message):
        gains.set_noise_({LAST: torch.full((4,), 9.0), **noise})
    gains.set_trained_({})
    assert values(norms) == {FIRST: [1.75] * 4, LAST: [0.5] * 4}
