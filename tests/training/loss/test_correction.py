"""Importance weights against TRL, and values by hand."""

import math

import pytest
import torch

from qerl.config.schema import CorrectionConfig
from training.loss.correction import Mismatch, importance_weights

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def by_trl(old, sampling, mask, mode, cap, floor):
    """The weights of TRL 1.16 (`_generate_and_score_completions`), written again by hand."""
    difference = (old - sampling) * mask
    if "sequence" in mode:
        difference = difference.sum(-1, keepdim=True)
    ratio = torch.exp(difference)
    if "truncate" in mode:
        return torch.clamp(ratio, min=floor, max=cap)
    low = -math.inf if floor is None else floor
    return torch.where((ratio < low) | (ratio > cap), torch.zeros(()), ratio)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("floor", [None, 0.5])
def test_weights_equal_those_of_trl(mode, floor):
    torch.manual_seed(0)
    old, sampling = torch.randn(5, 7), torch.randn(5, 7)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [1], [5], [0]])).long()
    ours = importance_weights(old, sampling, mask, CorrectionConfig(mode=mode, cap=2.0, floor=floor))
    torch.testing.assert_close(ours, by_trl(old, sampling, mask, mode, 2.0, floor))


def test_the_mismatch_equals_values_by_hand():
    old = torch.log(torch.tensor([[0.6, 0.2, 0.9]]))
    sampling = torch.log(torch.tensor([[0.2, 0.4, 0.1]]))
    mask = torch.tensor([[1, 1, 0]])
    config = CorrectionConfig(cap=2.0)
    mismatch = Mismatch()
    mismatch.add(old, sampling, mask, config)
    metrics = mismatch.metrics(config)
    kl = ((3 - math.log(3) - 1) + (0.5 - math.log(0.5) - 1)) / 2
    assert metrics["mismatch_kl"] == pytest.approx(kl, rel=1e-6)
    assert metrics["mismatch/mean_abs"] == pytest.approx((math.log(3) + math.log(2)) / 2, rel=1e-6)
    assert metrics["mismatch/max_abs"] == pytest.approx(math.log(3), rel=1e-6)
    assert metrics["correction/mean_weight"] == pytest.approx((2 + 0.5) / 2)
    assert metrics["correction/capped_share"] == pytest.approx(0.5)
    assert metrics["correction/ess"] == pytest.approx(2.5**2 / (2 * (2**2 + 0.5**2)))  # weights 2 (capped) and 1/2
    assert "correction/masked_share" not in metrics


ESS = {  # by hand: ratios 3 and 1/2 in the first row, 1 in the second, with a cap of 2
    "token_truncate": (2 + 0.5 + 1) ** 2 / (3 * (4 + 0.25 + 1)),
    "token_mask": (0 + 0.5 + 1) ** 2 / (3 * (0 + 0.25 + 1)),
    "sequence_truncate": (1.5 + 1.5 + 1) ** 2 / (3 * (2.25 + 2.25 + 1)),  # both tokens of row 1 have the ratio 3/2
    "off": (3 + 0.5 + 1) ** 2 / (3 * (9 + 0.25 + 1)),
}


@pytest.mark.parametrize("mode", ESS)
def test_the_effective_sample_size_equals_values_by_hand(mode):
    old = torch.log(torch.tensor([[0.6, 0.2], [0.3, 0.9]]))
    sampling = torch.log(torch.tensor([[0.2, 0.4], [0.3, 0.1]]))
    config, mismatch = CorrectionConfig(mode=mode, cap=2.0), Mismatch()
    mismatch.add(old, sampling, torch.tensor([[1, 1], [1, 0]]), config)
    metrics = mismatch.metrics(config)
    assert metrics["correction/ess"] == pytest.approx(ESS[mode], rel=1e-6)
    assert mode != "off" or not {"correction/mean_weight", "correction/capped_share"} & metrics.keys()
    masked, config = Mismatch(), CorrectionConfig(mode="token_mask", cap=2.0)
    masked.add(torch.zeros(1, 2), torch.full((1, 2), -3.0), torch.ones(1, 2), config)
    assert masked.metrics(config)["correction/ess"] == 0  # all weights are masked


def test_micro_batches_add_up_to_the_whole():
    torch.manual_seed(1)
    old, sampling, mask = torch.randn(6, 4), torch.randn(6, 4), torch.randint(0, 2, (6, 4))
    config = CorrectionConfig(mode="token_mask", cap=1.5)
    whole, parts = Mismatch(), Mismatch()
    whole.add(old, sampling, mask, config)
    for start in range(0, 6, 2):
        parts.add(old[start : start + 2], sampling[start : start + 2], mask[start : start + 2], config)
    assert parts.metrics(config) == pytest.approx(whole.metrics(config))


@pytest.mark.parametrize("first", [True, False])
def test_a_nan_is_not_hidden_by_the_largest_difference(first):
    mismatch = Mismatch()
    for value in (math.nan, 0.5) if first else (0.5, math.nan):
        mismatch.add(torch.tensor([[value]]), torch.zeros(1, 1), torch.ones(1, 1), CorrectionConfig())
    assert math.isnan(mismatch.metrics(CorrectionConfig())["mismatch/max_abs"])


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_shares_of_sequences_count_the_tokens_that_are_trained_on(mode):
    """The first row's ratio is 3 * 2 = 6, the second's 1; of five places three are tokens, and two of these capped."""
    old = torch.log(torch.tensor([[0.6, 0.4, 0.9], [0.3, 0.9, 0.9]]))
    sampling = torch.log(torch.tensor([[0.2, 0.2, 0.1], [0.3, 0.1, 0.1]]))
    config = CorrectionConfig(mode=mode, cap=2.0)
    mismatch = Mismatch()
    mismatch.add(old, sampling, torch.tensor([[1, 1, 0], [1, 0, 0]]), config)
    share = {"sequence_truncate": "correction/capped_share", "sequence_mask": "correction/masked_share"}[mode]
    assert mismatch.metrics(config)[share] == pytest.approx(2 / 3)
