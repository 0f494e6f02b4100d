"""Every loss by its name in TRL, every advantage scale and the KL term: values by hand, equations, gradients.

There are four completions of 4, 2, 3 and 1 tokens. The old logprobs set their ratios, so that each value can be checked
with a pencil. The equations below are written from the papers and not from TRL's code. Where a paper leaves something
open (constants, or the divisor over a batch), TRL decides, and the comment says so.
"""

import math

import pytest
import torch

import training.step
import training.trainer
from qerl.checkpoint.adapter import adapter_tensors
from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import ADVANTAGES, MASK, batch_of, build_trainer, inputs_of, scores
from training.loss.groups import GradedGroup, Group, Prompt, Sample, group_advantages
from training.step import padded_batch

RATIO = torch.tensor([[1.5, 0.5, 1.0, 1.25], [1.5, 0.5, 1, 1], [2.0, 1.0, 0.9, 1], [0.7, 1, 1, 1]])
A = ADVANTAGES[:, None]  # 1, -1, 0.7, -0.7
LENGTHS = MASK.sum(-1)


def clipped(ratio, low, high):
    """The clipped surrogate with DAPO's two bounds (arXiv 2503.14476, eq. 8; one bound: arXiv 2402.03300, eq. 3)."""
    return torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def sequence(ratio):
    """The geometric means (rows, 1) of the tokens' ratios (GSPO, arXiv 2507.18071, eq. 7)."""
    return ((ratio.log() * MASK).sum(-1, keepdim=True) / LENGTHS[:, None]).exp()


def token_mean(values):
    return (values * MASK).sum() / MASK.sum()


def dapo(logprobs, ratio):
    """arXiv 2503.14476, eq. 8: every token of the batch has the same weight."""
    return -token_mean(clipped(ratio, 0.2, 0.28))


def two_sided(logprobs, ratio):
    """INTELLECT-2 (arXiv 2505.07291): the ratio itself has an upper bound, which only negative advantages feel."""
    return -token_mean(torch.minimum(ratio.clamp(max=1.4) * A, ratio.clamp(0.8, 1.28) * A))


def grpo(logprobs, ratio):
    """arXiv 2402.03300, eq. 3: a mean over each completion's tokens, then over completions."""
    return -((clipped(ratio, 0.2, 0.2) * MASK).sum(-1) / LENGTHS).mean()


def dr_grpo(logprobs, ratio):
    """arXiv 2503.20783, section 3.1: divided by a constant instead of lengths, here rows times max_new_tokens (8)."""
    return -(clipped(ratio, 0.2, 0.2) * MASK).sum() / (4 * 8)


def gspo(logprobs, ratio):
    """arXiv 2507.18071, eq. 5."""
    return -clipped(sequence(ratio), 0.2, 0.2).mean()


def luspo(logprobs, ratio):
    """arXiv 2602.05261: the term of GSPO times the length of the completion."""
    return -(clipped(sequence(ratio), 0.2, 0.2)[:, 0] * LENGTHS).mean()


def cispo(logprobs, ratio):
    """arXiv 2506.13585, eq. 4 and 5: the ratio, clipped from above, is a weight only; the gradient is of log pi."""
    return -token_mean(ratio.clamp(max=1.2).detach() * A * logprobs)


def sapo(logprobs, ratio):
    """arXiv 2511.20347: a soft gate 4 / tau * sigmoid(tau (r - 1)); tau is 1 for positive advantages, else 1.05."""
    tau = torch.where(A > 0, 1.0, 1.05)
    gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return -((gate * A * MASK).sum(-1) / LENGTHS).mean()


def vespo(logprobs, ratio):
    """arXiv 2602.10693: log pi is weighted by phi(w) = w^k exp(lambda (1 - w)) of the sequence's ratio w.

    (k, lambda) is (2, 3) for positive advantages, else (3, 2).
    """
    w = (ratio.log() * MASK).sum(-1, keepdim=True).exp()
    k, rate = torch.where(A > 0, 2.0, 3.0), torch.where(A > 0, 3.0, 2.0)
    phi = (w**k * torch.exp(rate * (1 - w))).detach()
    return -token_mean(phi * A * logprobs)


ONE_CLIP = "loss.clip_high=0.2"
# equation, recipe, value by hand (None if it depends on the logprobs of the model)
#   clipped at [0.8, 1.28]: 1.28 + 0.5 + 1 + 1.25, -1.5 - 0.8, 0.7 (1.28 + 1 + 0.9), -0.7 * 0.8, over 10 tokens
#   with delta 1.4, 1.5 becomes 1.4 where A < 0
#   clipped at [0.8, 1.2]: sums 3.9, -2.3, 2.17, -0.56 of 4, 2, 3, 1 tokens
#   sequences: 0.9375^(1/4), 0.75^(1/2), 1.8^(1/3) clipped to 1.2, 0.7 clipped to 0.8
S1, S2 = 0.9375**0.25, 0.75**0.5
LOSSES = {
    "dapo": (dapo, ["loss.type=dapo"], -(4.03 - 2.3 + 2.226 - 0.56) / 10),
    "two_sided": (two_sided, ["loss.delta=1.4"], -(4.03 - 1.4 - 0.8 + 2.226 - 0.56) / 10),
    "bnpo": (dapo, ["loss.type=bnpo"], -(4.03 - 2.3 + 2.226 - 0.56) / 10),  # like dapo, a mean over all tokens
    "grpo": (grpo, ["loss.type=grpo", ONE_CLIP], -(3.9 / 4 - 2.3 / 2 + 2.17 / 3 - 0.56) / 4),
    "dr_grpo": (dr_grpo, ["loss.type=dr_grpo", ONE_CLIP], -(3.9 - 2.3 + 2.17 - 0.56) / 32),
    "gspo": (gspo, ["loss.type=grpo", "loss.level=sequence", ONE_CLIP], -(S1 - S2 + 0.84 - 0.56) / 4),
    "luspo": (luspo, ["loss.type=luspo", "loss.level=sequence", ONE_CLIP], -(4 * S1 - 2 * S2 + 2.52 - 0.56) / 4),
    "cispo": (cispo, ["loss.type=cispo", "loss.clip_high=1.2"], None),
    "sapo": (sapo, ["loss.type=sapo"], None),
    "vespo": (vespo, ["loss.type=vespo"], None),
}


def value_and_gradient(trainer, loss):
    trainer.model.zero_grad()
    value = loss()
    value.backward()
    tensors = adapter_tensors(trainer.model)
    return value.item(), torch.cat([tensors[name].grad.flatten() for name in sorted(tensors)])


def loss_of(trainer, batch):
    """(value, gradient, metrics) of the trainer's own loss."""
    found = {}

    def loss():
        value, metrics = trainer.loss_of(inputs_of(trainer, batch))
        found.update(metrics)
        return value

    return *value_and_gradient(trainer, loss), found


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_agree_with_the_papers(nvfp4_base, tmp_path, name):
    equation, overrides, by_hand = LOSSES[name]
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, *overrides), tmp_path)
    old = (scores(trainer) - RATIO.log()).detach()
    batch = batch_of(old, old)
    value, gradient, found = loss_of(trainer, batch)
    assert found["update_kl"] == [pytest.approx(token_mean(RATIO - RATIO.log() - 1).item(), rel=1e-4)]

    def by_equation():
        logprobs = scores(trainer)
        return equation(logprobs, (logprobs - old).exp())

    expected, expected_gradient = value_and_gradient(trainer, by_equation)
    assert value == pytest.approx(expected, abs=1e-5)
    assert by_hand is None or value == pytest.approx(by_hand, abs=1e-5)
    assert expected_gradient.norm() > 0
    assert (gradient - expected_gradient).norm() < 1e-3 * expected_gradient.norm()


SLOPES = {  # d loss / d log pi of the first completion's tokens (ratios 1.5, 0.5, 1, 1.25; A = 1), times the divisor
    "dapo": (10, [0, 0.5, 1, 1.25]),  # above 1.28 the gradient is 0
    "cispo": (10, [1.2, 0.5, 1, 1.2]),  # a clipped token keeps its gradient
    "sapo": (16, [4 * p * (1 - p) * r for r in (1.5, 0.5, 1, 1.25) for p in [1 / (1 + math.exp(1 - r))]]),
    "gspo": (16, [S1] * 4),
    "vespo": (10, [0.9375**2 * math.exp(3 * 0.0625)] * 4),
}


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_equal_values_by_hand(name):
    """The slopes of clipped tokens, worked out from the equations, which checks the equations above too."""
    divisor, slopes = SLOPES[name]
    logprobs = torch.zeros(4, 4, requires_grad=True)
    LOSSES[name][0](logprobs, (logprobs + RATIO.log()).exp()).backward()
    torch.testing.assert_close(-divisor * logprobs.grad[0], torch.tensor(slopes), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unbiased", [True, False])
def test_the_kl_term_is_k3(nvfp4_base, tmp_path, unbiased):
    """arXiv 2402.03300, eq. 4: pi_ref / pi - log(pi_ref / pi) - 1 for each token, with the token's weight in the loss.

    Its gradient is not that of KL(pi, pi_ref), but multiplied by the ratio it is (arXiv 2512.02556, section 3.1).
    """
    settings = ("loss.kl_coef=0.5", f"loss.kl_unbiased={str(unbiased).lower()}")
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, *settings), tmp_path)
    old = scores(trainer).detach()
    odds = torch.tensor([[2.0], [0.5], [1.0], [4.0]]).expand(4, 4)  # pi_ref / pi of each row
    value, gradient, found = loss_of(trainer, batch_of(old, old, reference=old + odds.log()))
    k3 = [2 - math.log(2) - 1, 0.5 + math.log(2) - 1, 0, 4 - math.log(4) - 1]
    by_hand = -(4 - 2 + 3 * 0.7 - 0.7) / 10 + 0.5 * (4 * k3[0] + 2 * k3[1] + k3[3]) / 10
    assert value == pytest.approx(by_hand, abs=1e-5)
    assert found["kl"] == [pytest.approx((4 * k3[0] + 2 * k3[1] + k3[3]) / 10, abs=1e-5)]

    def by_equation():
        logprobs = scores(trainer)
        ratio, odds_now = (logprobs - old).exp(), (old + odds.log() - logprobs).exp()
        kl = (odds_now - odds_now.log() - 1) * (ratio if unbiased else 1)
        return dapo(logprobs, ratio) + 0.5 * token_mean(kl)

    expected = value_and_gradient(trainer, by_equation)[1]
    assert (gradient - expected).norm() < 1e-3 * expected.norm()


def group_of(row, completions, end):
    """A group of the given completions, of which those that do not end with `end` are truncated."""
    samples = [Sample(ids, [-1.0] * len(ids), [True] * len(ids), ids[-1] != end) for ids in completions]
    return Group(Prompt(row, [3, 4], "ab", None), tuple(samples))


REWARDS = [1.0, 0.0, 0.0, 0.0, 3.0, 3.0, 1.0, 1.0]  # means 1/4 and 2; unbiased stds 1/2 and sqrt(4/3)
WHOLE_STD = math.sqrt((0.125**2 + 3 * 1.125**2 + 2 * 1.875**2 + 2 * 0.125**2) / 7)  # around the mean 9/8
SCALES = {
    "group": ([0.5] * 4 + [math.sqrt(4 / 3)] * 4),  # arXiv 2402.03300, section 4.1.2
    "batch": [WHOLE_STD] * 8,  # arXiv 2508.08221
    "none": None,  # arXiv 2503.20783
}


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_values_by_hand(scale):
    advantages = group_advantages(torch.tensor(REWARDS).view(2, 4), scale)[0]
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25], [1, 1, -1, -1]])
    if SCALES[scale] is not None:
        expected = expected / (torch.tensor(SCALES[scale]).view(2, 4) + 1e-4)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("masked", [True, False])
def test_overlong_filtering_removes_truncated_completions_from_the_loss_only(masked):
    """arXiv 2503.14476, section 3.4: their loss is masked, but they count for the group's mean and std."""
    end = 1
    completions = [[10, end], [11, 12], [13, 14, end], [15], [10, end], [10, end], [end], [10, 11, 12]]
    total_P_G = torch.tensor(REWARDS).view(2, 4)
    graded = [
        GradedGroup(group_of(row, completions[4 * row :][:4], end), ("",) * 4, total[:, None], total, True)
        for row, total in enumerate(total_P_G)
    ]
    batch = padded_batch(graded, group_advantages(total_P_G, "group")[0], 0, masked)
    kept = [2, 0, 3, 0, 2, 2, 1, 0] if masked else [len(ids) for ids in completions]
    assert batch.completion_mask_B_T.sum(1).tolist() == batch.loss_mask_B_T.sum(1).tolist() == kept
    assert batch.advantages_B[1] == pytest.approx(-0.25 / 0.5001, rel=1e-5)


def test_old_logprobs_are_those_of_the_policy_without_dropout(nvfp4_base, tmp_path):
    """The engine samples without dropout, and ranks that score different rows must not draw random numbers for it."""
    settings = ("adapter.dropout=0.5", "loss.num_iterations=2", "run.save_every=2")
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, *settings), tmp_path)
    batch, random_state = batch_of(None, None), torch.get_rng_state()
    old = training.step.score(trainer.parts, batch).old_logprobs_B_T
    assert torch.equal(torch.get_rng_state(), random_state)
    assert trainer.model.training
    assert (scores(trainer) - old).abs().max() > 1e-3  # the forward pass that trains has dropout
    trainer.model.eval()
    torch.testing.assert_close(old, scores(trainer).detach(), rtol=0, atol=1e-5)
