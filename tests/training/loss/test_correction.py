"""Importance weights against TRL, values by hand, and a policy gradient that can be computed exactly."""

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


def test_weights_equal_values_by_hand():
    old = torch.log(torch.tensor([[0.6, 0.2, 0.5]]))
    sampling = torch.log(torch.tensor([[0.2, 0.4, 0.5]]))
    mask = torch.ones(1, 3)
    weights = {mode: importance_weights(old, sampling, mask, CorrectionConfig(mode=mode, cap=2.0)) for mode in MODES}
    torch.testing.assert_close(weights["token_truncate"], torch.tensor([[2.0, 0.5, 1.0]]))  # ratios 3, 1/2, 1
    torch.testing.assert_close(weights["token_mask"], torch.tensor([[0.0, 0.5, 1.0]]))
    torch.testing.assert_close(weights["sequence_truncate"], torch.tensor([[1.5]]))
    torch.testing.assert_close(weights["sequence_mask"], torch.tensor([[1.5]]))


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
    config = CorrectionConfig(mode=mode, cap=2.0)
    mismatch = Mismatch()
    mismatch.add(old, sampling, torch.tensor([[1, 1], [1, 0]]), config)
    assert mismatch.metrics(config)["correction/ess"] == pytest.approx(ESS[mode], rel=1e-6)


def test_if_all_weights_are_masked_the_effective_sample_size_is_zero():
    mismatch, config = Mismatch(), CorrectionConfig(mode="token_mask", cap=2.0)
    mismatch.add(torch.zeros(1, 2), torch.full((1, 2), -3.0), torch.ones(1, 2), config)
    assert mismatch.metrics(config)["correction/ess"] == 0


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


def test_identical_policies_have_no_mismatch():
    logprobs = torch.randn(3, 5)
    mismatch = Mismatch()
    mismatch.add(logprobs, logprobs, torch.ones(3, 5), CorrectionConfig())
    assert mismatch.mean_kl == 0
    assert mismatch.metrics(CorrectionConfig())["correction/mean_weight"] == 1


def test_off_reports_the_mismatch_only():
    mismatch = Mismatch()
    mismatch.add(torch.zeros(1, 2), torch.full((1, 2), 0.1), torch.ones(1, 2), CorrectionConfig(mode="off"))
    assert set(mismatch.metrics(CorrectionConfig(mode="off"))) == {
        "mismatch_kl", "mismatch/mean_abs", "mismatch/max_abs", "correction/ess",
    }  # fmt: skip


def test_the_weighted_gradient_of_a_noisy_sampler_is_that_of_the_clean_policy():
    """With one token of 4, the expectation of weight * advantage * grad log p over the sampler can be enumerated."""
    torch.manual_seed(2)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)
    clean = torch.log_softmax(logits, -1)
    noisy = torch.log_softmax(logits.detach() + 0.3 * torch.randn(4, dtype=torch.float64), -1)
    (exact,) = torch.autograd.grad((clean.exp() * advantages).sum(), logits, retain_graph=True)
    weights = importance_weights(clean.detach()[:, None], noisy[:, None], torch.ones(4, 1), CorrectionConfig(cap=1e6))[
        :, 0
    ]
    surrogate = (noisy.exp() * weights * advantages * clean).sum()
    (estimated,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    torch.testing.assert_close(estimated, exact)
    (uncorrected,) = torch.autograd.grad((noisy.exp() * advantages * clean).sum(), logits)
    assert (uncorrected - exact).norm() > 0.05 * exact.norm()


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
