"""A step divided into micro-batches: every split gives the same update, which is that of TRL's padded batch."""

from dataclasses import replace

import pytest
import torch

from qerl.checkpoint.adapter import adapter_tensors
from qerl.plan.micro_batch_plan import MicroBatchPlan
from tests.helpers.bases import write_base
from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import build_trainer, run_backward, with_plan
from training.loss.batch import Batch, LossInputs, split
from training.loss.correction import importance_weights

LENGTHS = [(2, 5), (2, 5), (5, 1), (3, 8), (3, 3), (1, 6)]  # prompt and completion tokens of each row
MASKED, IDLE = 1, 4  # a truncated row, and one with advantage 0
LOSSES = [(name, "token") for name in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo")]
LOSSES += [("grpo", "sequence"), ("luspo", "sequence")]

CLIPPED = [f"clip_ratio/{name}_mean" for name in ("low", "high", "region")]


def padded(values, left, fill):
    width = max(map(len, values))
    return torch.tensor(
        [([fill] * (width - len(v)) + v) if left else (v + [fill] * (width - len(v))) for v in map(list, values)]
    )


def step_inputs(trainer):
    """A step of six rows; old and sampling logprobs differ enough from the policy's to clip some ratios."""
    torch.manual_seed(5)
    prompts = [torch.randint(3, 40, (p,)).tolist() for p, _ in LENGTHS]
    completions = [torch.randint(3, 40, (c,)).tolist() for _, c in LENGTHS]
    prompts[4] = prompts[3] = prompts[0] + [7]  # a group with a shared prompt, which includes the idle row
    batch = Batch(
        prompt_ids_B_L=padded(prompts, True, 0),
        prompt_mask_B_L=padded([[1] * p for p, _ in LENGTHS], True, 0),
        completion_ids_B_T=padded(completions, False, 0),
        completion_mask_B_T=padded([[1] * c for _, c in LENGTHS], False, 0),
        loss_mask_B_T=padded([[int(row != MASKED)] * c for row, (_, c) in enumerate(LENGTHS)], False, 0),
        advantages_B=torch.tensor([1.0, -0.5, -1.0, 0.7, 0.0, -0.7]),
        sampling_logprobs_B_T=torch.empty(0),
    )
    batch = replace(batch, completion_mask_B_T=batch.loss_mask_B_T)
    logprobs = trainer.parts.packed.score(*batch.tokens(), batch.loss_mask_B_T)
    old = logprobs + 0.3 * torch.randn_like(logprobs)
    sampling = old + 0.3 * torch.randn_like(logprobs)
    reference = logprobs + 0.3 * torch.randn_like(logprobs)
    return replace(batch, sampling_logprobs_B_T=sampling, old_logprobs_B_T=old, reference_logprobs_B_T=reference)


def gradients(trainer):
    return {name: tensor.grad.clone() for name, tensor in adapter_tensors(trainer.model).items()}


def cut(trainer, batch, tokens, recomputed=0):
    """(loss, gradients by name, metrics) of the step, with micro-batches of `tokens`."""
    trainer.model.zero_grad()
    parts = with_plan(trainer.parts, MicroBatchPlan(tokens, recomputed, recomputed))
    update = run_backward(trainer, batch, parts)
    return update.loss.item(), gradients(trainer), update.metrics


def whole_by_trl(trainer, batch):
    """TRL's loss of the whole step, from logprobs of padded rows through the model; the weights are ours."""
    trainer.model.zero_grad()
    input_ids, attention_mask = batch.tokens()
    logits = trainer.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -batch.width - 1 : -1]
    log_p = (logits.float() / trainer.parts.config.rollout.temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, input_ids[:, -batch.width :, None])[..., 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    config, mask = trainer.parts.config.loss, batch.loss_mask_B_T
    weights = importance_weights(batch.old_logprobs_B_T, batch.sampling_logprobs_B_T, mask, config.correction)
    loss, metrics = trainer.loss_of(LossInputs(batch, logprobs, entropies, weights, mask.sum(), config.entropy_coef))
    loss.backward()
    return loss.item(), gradients(trainer), {name: values[0] for name, values in metrics.items()}


def assert_same(one, other, metrics=()):
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    for name, gradient in one[1].items():
        scale = other[1][name].abs().max()
        assert scale > 0
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=1e-5 * float(scale))
    for name in metrics:
        assert one[2][name] == pytest.approx(other[2][name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_every_split_equals_the_whole_batch_of_trl(nvfp4_base, tmp_path, loss_type, level):
    """All terms of the loss are on, so that no row except the masked one may be left out."""
    overrides = (f"loss.type={loss_type}", f"loss.level={level}", "loss.kl_coef=0.1", "loss.entropy_coef=0.05")
    overrides += {"dapo": (), "cispo": ("loss.clip_high=1.2",)}.get(loss_type, ("loss.clip_high=0.2",))
    if level == "sequence":  # a sequence's ratio is nearer to 1 than a token's
        overrides += ("loss.clip_low=0.05", "loss.clip_high=0.05")
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, *overrides, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer)
    reference = whole_by_trl(trainer, inputs)
    metrics = sorted(set(reference[2]) - {"clip_ratio/low_min", "clip_ratio/high_max", "entropy_coef"})
    assert {"entropy", "kl", "policy_loss"} <= set(metrics)
    if level == "sequence" or loss_type == "vespo":  # TRL's means over rows include the masked one
        metrics = [name for name in metrics if not name.startswith(("clip_ratio", "vespo"))]
    splits = [cut(trainer, inputs, tokens) for tokens in (1, 14, 1000)]
    for split_ in splits:
        assert_same(split_, reference, metrics)
        assert split_[2]["completions/trained_share"] == pytest.approx(5 / 6)
    if level == "sequence":  # of our own, means over the rows that are trained on
        clipped = {name: value for name, value in splits[-1][2].items() if name in CLIPPED}
        assert 0 < clipped["clip_ratio/region_mean"] < 1
        for split_ in splits[:-1]:
            assert {name: split_[2][name] for name in clipped} == pytest.approx(clipped)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_rows_equal_the_padded_ones_of_trl(tmp_path, family):
    base = write_base(tmp_path / family, family, hidden=32)
    config = small_config(base, tmp_path, "model.format=bf16", "loss.kl_coef=0.1", "rollout.temperature=0.8")
    trainer = build_trainer(config, tmp_path)
    inputs = step_inputs(trainer)
    reference = whole_by_trl(trainer, inputs)
    for tokens, recomputed in ((1000, 0), (14, 1), (14, 2)):
        assert_same(cut(trainer, inputs, tokens, recomputed), reference, ("entropy", "kl"))


def test_a_step_of_equal_rewards_keeps_its_metrics_and_has_no_gradient(nvfp4_base, tmp_path):
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs = replace(step_inputs(trainer), advantages_B=torch.zeros(6))
    loss, gradients, metrics = cut(trainer, inputs, 14)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert metrics["entropy"] > 0
    assert metrics["completions/trained_share"] == 0
    for tokens in (1, 1000):
        others = cut(trainer, inputs, tokens)[2]
        assert all(others[name] == pytest.approx(metrics[name], rel=1e-6) for name in metrics if "memory" not in name)
    for ranks in (1, 2, 3):
        (kept,) = split(inputs, 1000, "dapo", advantage_only=True, ranks=ranks)
        assert (kept.ids[:, -8:].tolist(), kept.trains) == (inputs.tokens()[0][:1, -8:].tolist(), False)
    nothing = torch.zeros_like(inputs.completion_mask_B_T)
    inputs = replace(inputs, completion_mask_B_T=nothing, loss_mask_B_T=nothing)
    loss, gradients, metrics = cut(trainer, inputs, 14)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_shares_add_up(nvfp4_base, tmp_path):
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer)
    batches = split(inputs, 14, "grpo", advantage_only=False)
    assert [len(batch.rows) for batch in batches] == [2, 2, 1]  # 7 + 6 tokens; 3 + 8 + 3 with a shared prompt; 7
    for batch in batches:  # the rows packed on the CPU are those that the loss is computed from
        for packed, rows in zip((batch.ids, batch.mask), batch.rows.tokens(), strict=True):
            assert torch.equal(packed, rows)
    assert sum(batch.token_share for batch in batches) == pytest.approx(1)
    assert sum(batch.loss_share for batch in batches) == pytest.approx(5 / 6)  # the masked row counts as in TRL


def test_layers_that_recompute_run_twice_and_change_no_bit(nvfp4_base, tmp_path):
    """The embeddings need no gradient, which only reentrant checkpointing would require."""
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs, layers = step_inputs(trainer), trainer.model.get_base_model().model.layers
    runs, embedded = [], []
    hooks = [layer.mlp.register_forward_pre_hook(lambda *_: runs.append(0)) for layer in layers]
    embeddings = trainer.model.get_input_embeddings()
    hooks.append(embeddings.register_forward_hook(lambda *call: embedded.append(call[-1].requires_grad)))
    results, counts = [], []
    for recomputed in (0, 1, len(layers)):
        runs.clear()
        results.append(cut(trainer, inputs, 1000, recomputed))
        counts.append(len(runs))
        assert not any(layer.gradient_checkpointing for layer in layers)
    for hook in hooks:
        hook.remove()
    assert counts == [len(layers), len(layers) + 1, 2 * len(layers)]
    assert not any(embedded)
    loss, gradients, _ = results[0]
    for other_loss, others, _ in results[1:]:
        assert other_loss == loss
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


def test_tokens_that_the_policy_did_not_write_have_no_gradient_and_are_context(nvfp4_base, tmp_path):
    """Only the other tokens have a loss, but all tokens are read in their places."""
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    batch = step_inputs(trainer)
    loss_mask = batch.loss_mask_B_T.clone()
    loss_mask[:, 1:3] = 0  # the answer of a tool
    reference = whole_by_trl(trainer, replace(batch, loss_mask_B_T=loss_mask))
    for tokens in (1, 14, 1000):
        result = cut(trainer, replace(batch, loss_mask_B_T=loss_mask), tokens)
        assert_same(result, reference)
        assert result[2]["completions/trained_share"] == pytest.approx(4 / 6)  # but the masked and the idle row
    other = batch.old_logprobs_B_T.clone()
    other[:, 1:3] += 5.0  # neither their importance weights nor their ratios are used
    assert_same(cut(trainer, replace(batch, loss_mask_B_T=loss_mask, old_logprobs_B_T=other), 14), reference)
