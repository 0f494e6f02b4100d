"""What a run asks of its policy: of an adapter as before, of whole weights that reach the engine when they change."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.checkpoint.folder import WEIGHTS
from qerl.checkpoint.load import load_model
from qerl.checkpoint.shards import SINGLE
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import deliver
from tests.helpers.small_run import small_config
from training.policy.policy import AdapterPolicy, check_reference
from training.policy.weights import WeightsPolicy

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0)
TOKENS = torch.tensor([[5, 6, 7, 8]])


def acting_adapter(base, seed=0, alpha=8):
    policy = AdapterPolicy(attach_lora(load_model(base, "bf16", "float32"), 4, alpha))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.parameters():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return policy


def logits(policy):
    with torch.no_grad():
        return policy.model(input_ids=TOKENS).logits


def test_a_saved_adapter_is_loaded_and_one_that_would_act_otherwise_is_refused(base, tmp_path):
    policy, other = acting_adapter(base), acting_adapter(base, seed=1)
    policy.save(tmp_path)
    assert other.load(tmp_path) == 28
    assert torch.equal(logits(policy), logits(other))
    sent = policy.update().tensors  # the adapter's own, under the names of the checkpoint
    assert {name: id(tensor) for name, tensor in sent.items()} == {
        name: id(tensor) for name, tensor in adapter_tensors(policy.model).items()
    }
    with pytest.raises(ConfigError, match=r"alpha / rank 2 and would act with 4: write the adapter\.alpha"):
        acting_adapter(base, alpha=16).load(tmp_path)


def test_an_adapter_s_reference_is_the_base(base):
    policy = acting_adapter(base)
    acting = logits(policy)
    with policy.reference():
        without = logits(policy)
    assert torch.equal(logits(policy), acting)
    assert torch.equal(without, load_model(base, "bf16", "float32")(input_ids=TOKENS).logits)
    assert not torch.equal(without, acting)


# --- whole weights


def dense_weights(base):
    """(names and weights of the linears, names of the norms), from the 16-bit base."""
    model = load_model(base, "bf16", "float32")
    named = {name.removesuffix(".weight"): p.detach() for name, p in model.named_parameters() if ".layers." in name}
    linears = [(name, tensor) for name, tensor in named.items() if tensor.dim() == 2]
    return linears, [name for name in named if name.endswith("layernorm")]


@pytest.fixture
def engine(nvfp4_base):
    return open_engine(str(nvfp4_base), "nvfp4", EngineOptions(engine="transformers", device="cpu"))


@pytest.fixture
def policy(engine, base):
    """Masters of all linears and block norms; the norms act as they are, so an update reaches them before the sync."""
    return WeightsPolicy(engine.policy_model(), *dense_weights(base))


def descend(policy, steps=4, rate=2e-3):
    """A few steps of plain SGD on masters, towards smaller weights, so that no block scale saturates."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
    for _ in range(steps):
        for parameter in policy.parameters():
            parameter.grad = parameter.sign() * parameter.detach().abs().mean() * 10
        optimizer.step()


def test_changed_masters_reach_the_engine_with_a_sync_and_come_back_from_a_file(engine, base, tmp_path):
    policy, other = (WeightsPolicy(engine.policy_model(), dense_weights(base)[0]) for _ in range(2))
    assert deliver(policy.update(), engine) == 14
    before = engine.generate(PROMPTS, SAMPLED, seed=1)
    descend(policy)
    assert engine.generate(PROMPTS, SAMPLED, seed=1) == before  # nothing moves without a sync
    deliver(policy.update(), engine)
    assert engine.generate(PROMPTS, SAMPLED, seed=1) != before
    policy.save(tmp_path)
    masters = list(other.parameters())
    assert other.load(tmp_path) == 14
    for own, held, loaded in zip(policy.parameters(), masters, other.parameters(), strict=True):
        assert torch.equal(own, loaded)
        assert loaded is held  # by the optimizer


def test_trained_norms_act_in_float32(policy, engine):
    assert deliver(policy.update(), engine) == 14 + 4
    before = engine.score(PROMPTS, [[1, 2], [3]])
    with torch.no_grad():
        for name, norm in policy.update().norms.items():
            assert engine.policy_model().get_submodule(name).weight is norm
            norm.add_(1e-6)  # which bfloat16 would swallow
    assert engine.score(PROMPTS, [[1, 2], [3]]) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "q_proj" not in k}, "does not fit what is trained"),
        (lambda t: {k: v[:1] for k, v in t.items()}, "does not fit what is trained"),
        (lambda t: {k: v.bfloat16() for k, v in t.items()}, "does not fit what is trained"),
        (None, "has no model.safetensors"),
    ],
    ids=["missing", "shape", "dtype", "no file"],
)
def test_masters_that_do_not_fit_are_refused(policy, tmp_path, change, message):
    before = [master.detach().clone() for master in policy.parameters()]
    if change is not None:
        policy.save(tmp_path)
        save_file(change(load_file(tmp_path / WEIGHTS / SINGLE)), tmp_path / WEIGHTS / SINGLE)
    with pytest.raises(CheckpointError, match=message):
        policy.load(tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(before, policy.parameters(), strict=True))


def test_whole_weights_keep_no_reference(policy, base, tmp_path):
    assert policy.reference() is None
    check_reference(policy, 0.0)
    check_reference(acting_adapter(base), 0.1)
    with pytest.raises(ConfigError, match=r"loss\.kl_coef: 0\.1 compares .* write loss\.kl_coef: 0"):
        check_reference(policy, small_config(base, tmp_path, "loss.kl_coef=0.1").loss.kl_coef)
