"""A step cut into micro-batches: any split is the same update, and that of TRL's padded batch."""

import pytest
import torch
from bases import write_base
from small_run import small_config
from trainer_factory import build_trainer
from trl import GRPOTrainer

from qerl.checkpoint.adapter import adapter_tensors
from qerl.plan.micro_batch_plan import MicroBatchPlan
from training.loss.micro_batches import split
from training.policy.packed_policy import PackedPolicy
from training.trainer import QerlTrainer

LENGTHS = [(2, 5), (2, 5), (5, 1), (3, 8), (3, 3), (1, 6)]  # prompt and completion tokens of each row
MASKED, IDLE = 1, 4  # a truncated row, and one with advantage 0
LOSSES = [
    ("dapo", "token"),
    ("grpo", "token"),
    ("grpo", "sequence"),
    ("dr_grpo", "token"),
    ("bnpo", "token"),
    ("cispo", "token"),
    ("sapo", "token"),
    ("luspo", "sequence"),
    ("vespo", "token"),
]


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
    prompts[4] = prompts[3] = prompts[0] + [7]  # a group that shares its prompt, with the idle row
    inputs = {
        "prompt_ids": padded(prompts, True, 0),
        "prompt_mask": padded([[1] * p for p, _ in LENGTHS], True, 0),
        "completion_ids": padded(completions, False, 0),
        "completion_mask": padded([[1] * c for _, c in LENGTHS], False, 0),
        "advantages": torch.tensor([1.0, -0.5, -1.0, 0.7, 0.0, -0.7]),
    }
    inputs["completion_mask"][MASKED] = 0
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    inputs["old_per_token_logps"] = logprobs + 0.3 * torch.randn_like(logprobs)
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] + 0.3 * torch.randn_like(logprobs)
    inputs["ref_per_token_logps"] = logprobs + 0.3 * torch.randn_like(logprobs)
    return inputs


def update(trainer, loss):
    """(loss, gradients by name, metrics) of a step computed by `loss`."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer._step_metrics = {}
    value = loss()
    gradients = {name: tensor.grad.clone() for name, tensor in adapter_tensors(trainer.model).items()}
    averages = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return value.item(), gradients, averages | trainer._step_metrics


def cut(trainer, inputs, tokens, recomputed=0):
    """The step in micro-batches of `tokens`."""
    config, plan = trainer._config, MicroBatchPlan(tokens, recomputed, recomputed)
    trainer._plan = plan
    trainer._packed = PackedPolicy(trainer.model, config.rollout.temperature, plan, config.loss.entropy_coef > 0)
    return update(trainer, lambda: trainer.compute_loss(trainer.model, dict(inputs)))


def whole_by_trl(trainer, inputs, monkeypatch):
    """TRL's own loss of the whole step: padded rows through the model, its logprobs; the weights are ours."""

    def theirs(self, *args, **kwargs):
        output = GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        self._weigh(output[0].detach(), self._loss_inputs)
        return output

    def loss():
        value = trainer._compute_loss(trainer.model, dict(inputs))
        value.backward()
        return value

    with monkeypatch.context() as patch:
        patch.setattr(QerlTrainer, "_get_per_token_logps_and_entropies", theirs)
        return update(trainer, loss)


def assert_same(one, other, metrics=()):
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    for name, gradient in one[1].items():
        scale = other[1][name].abs().max()
        assert scale > 0
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=1e-5 * float(scale))
    for name in metrics:
        assert one[2][name] == pytest.approx(other[2][name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_any_split_is_trls_whole_batch(nvfp4_base, tmp_path, monkeypatch, loss_type, level):
    """With every term of the loss: no row may be left out but the masked one."""
    overrides = (f"loss.type={loss_type}", f"loss.level={level}", "loss.kl_coef=0.1", "loss.entropy_coef=0.05")
    overrides += {"dapo": (), "cispo": ("loss.clip_high=1.2",)}.get(loss_type, ("loss.clip_high=0.2",))
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, *overrides, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer)
    reference = whole_by_trl(trainer, inputs, monkeypatch)
    metrics = sorted(set(reference[2]) - {"clip_ratio/low_min", "clip_ratio/high_max", "entropy_coef"})
    assert {"entropy", "kl", "policy_loss"} <= set(metrics)
    if level == "sequence" or loss_type == "vespo":  # TRL's means over rows count the masked one
        metrics = [name for name in metrics if not name.startswith(("clip_ratio", "vespo"))]
    for tokens in (1, 14, 1000):
        assert_same(cut(trainer, inputs, tokens), reference, metrics)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_packed_rows_are_trls_padded_ones(tmp_path, monkeypatch, family):
    base = write_base(tmp_path / family, family, hidden=32)
    config = small_config(base, tmp_path, "model.format=bf16", "loss.kl_coef=0.1", "rollout.temperature=0.8")
    trainer = build_trainer(config, tmp_path)
    inputs = step_inputs(trainer)
    reference = whole_by_trl(trainer, inputs, monkeypatch)
    for tokens, recomputed in ((1000, 0), (14, 1), (14, 2)):
        assert_same(cut(trainer, inputs, tokens, recomputed), reference, ("entropy", "kl"))


def test_rows_without_a_loss_are_left_out_and_change_nothing(nvfp4_base, tmp_path, monkeypatch):
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer)
    for tokens in (1, 14, 1000):
        result = cut(trainer, inputs, tokens)
        assert_same(result, whole_by_trl(trainer, inputs, monkeypatch))
        assert result[2]["completions/trained_share"] == pytest.approx(4 / 6)


def test_a_step_of_equal_rewards_keeps_its_metrics_and_has_no_gradient(nvfp4_base, tmp_path):
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer) | {"advantages": torch.zeros(6)}
    loss, gradients, metrics = cut(trainer, inputs, 14)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert metrics["entropy"] > 0
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    loss, gradients, metrics = cut(trainer, inputs, 14)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_shares_add_up(nvfp4_base, tmp_path):
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)
    inputs = step_inputs(trainer)
    batches = split(inputs, 14, "grpo", advantage_only=False)
    assert [batch.rows for batch in batches] == [2, 2, 1]  # 7 + 6; 3 + 8 + 3, one prompt; 7
    for batch in batches:  # what is packed on the CPU is what the loss is computed of
        for name, joined in (("ids", batch.ids), ("mask", batch.mask)):
            parts = [batch.inputs[f"prompt_{name}"], batch.inputs[f"completion_{name}"]]
            assert torch.equal(joined, torch.cat(parts, 1))
    assert sum(batch.token_share for batch in batches) == pytest.approx(1)
    assert sum(batch.loss_share for batch in batches) == pytest.approx(5 / 6)  # the masked row counts as TRL counts it


def test_layers_that_recompute_run_twice_and_change_no_bit(nvfp4_base, tmp_path):
    """And what only the reentrant kind needs, a gradient of the embeddings, is not asked for."""
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
