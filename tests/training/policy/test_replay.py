"""Packed rows with experts that an engine chose: where each token's go, and what the policy computes with them."""

import pytest
import torch

from qerl.checkpoint.load import load_model
from qerl.engine.interface import UNRECORDED
from qerl.engine.transformers.sampling import recorded_experts
from qerl.model.packing import pack
from qerl.plan.micro_batch_plan import MicroBatchPlan
from tests.helpers.bases import write_base
from training.loss.correction import Mismatch
from training.policy.packed_policy import PackedPolicy

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_seed")
IDS = torch.tensor([[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14], [0, 1, 2, 17, 18, 19]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
LENGTHS = (4, 6, 4, 5)


def numbered(row, length):
    """Experts (length, 2, 2) that say whose token each is: 10 times the row plus the place."""
    return (10 * row + torch.arange(length)).to(torch.uint8)[:, None, None].expand(-1, 2, 2).clone()


def test_each_token_has_its_own_experts_and_a_shared_prompt_those_of_the_first_row():
    experts = [numbered(row, length) for row, length in enumerate(LENGTHS)]
    experts[3][4] = UNRECORDED
    row = pack(IDS, MASK, 3, experts=experts)
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 17, 18, 19, 5, 6, 7, 8, 9, 10]]
    expected = [0, 1, 2, 3, 32, 33, UNRECORDED, 10, 11, 12, 13, 14, 15]
    assert row.replay.ids[:, 1, 0].tolist() == expected
    assert row.replay.ids.dtype == torch.uint8
    assert row.replay.choices == 2 * 12
    assert pack(IDS, MASK, 3).replay is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_base(tmp_path_factory.mktemp("base") / "moe", "qwen3_moe"), "bf16")


def own_choices(model):
    """What the model chooses for each row of IDS, read alone."""
    found = []
    for ids, mask in zip(IDS, MASK, strict=True):
        with torch.no_grad(), recorded_experts(model, True) as record:
            model(ids[mask.bool()][None])
            found.append(record(0, 0, int(mask.sum())))
    return found


def logprobs(model, experts, checkpointed=False):
    """Logprobs of the scored tokens, the gradient to the embeddings, and the packed row."""
    plan = MicroBatchPlan(64, 2 * checkpointed, 2 * checkpointed)
    policy, row = PackedPolicy(model, 1.0, plan), pack(IDS, MASK, 3, experts=experts)
    weight = model.get_input_embeddings().weight.requires_grad_()
    with policy.training():
        values = policy.logprobs(row, (4, 3))[0]
        (gradient,) = torch.autograd.grad(values.sum(), weight)
    weight.requires_grad_(False)
    return values.detach(), gradient, row


def test_the_models_own_choices_change_nothing(model):
    values, gradient, _ = logprobs(model, None)
    replayed, same, row = logprobs(model, own_choices(model))
    torch.testing.assert_close(values, replayed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-5)
    assert row.replay.changed.tolist() == [0.0, 0.0]


def test_other_choices_change_the_logprobs_and_are_counted(model):
    experts = own_choices(model)
    for one in experts:
        one[:, 1] = (one[:, 1] + 1) % 4  # of four experts: none of the pairs stays as it is, but for 0, 2 and 1, 3
    own = own_choices(model)
    differs = sum(
        bool((one[place, 1].sort().values != other[place, 1].sort().values).any())
        for number, (one, other) in enumerate(zip(experts, own, strict=True))
        for place in range(2 * (number == 3), len(one) * (number != 2))  # a prompt once, and not the masked row
    )
    values, _, row = logprobs(model, experts)
    assert row.replay.changed.tolist() == [0.0, differs]
    assert not torch.allclose(values, logprobs(model, own)[0], atol=1e-3)
    mismatch = Mismatch()
    mismatch.add_replay(row.replay)
    mismatch.merge(mismatch)
    assert mismatch.changed_choices / mismatch.choices == differs / (2 * 13)


def test_a_recomputed_layer_uses_them_again(model):
    experts = [torch.rand(length, 2, 4).topk(2).indices.to(torch.uint8) for length in LENGTHS]
    values, gradient, _ = logprobs(model, experts)
    again, same, _ = logprobs(model, experts, checkpointed=True)
    torch.testing.assert_close(values, again)
    torch.testing.assert_close(gradient, same)
    assert not torch.allclose(gradient, logprobs(model, None, checkpointed=True)[1], atol=1e-3)
