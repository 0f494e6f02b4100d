"""Whole runs against TRL's trainer on a model of transformers: equal rollouts have to give equal adapters.

A GRPOTrainer without any of our code replays the rollouts of our run: completions of one to eight tokens, some without
an end, with the logprobs of the noisy sampler. It has padded rows, plain PEFT layers, its own correction, and several
updates.
"""

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import training.run
from qerl.checkpoint.adapter import adapter_tensors
from qerl.engine.interface import Completion
from tests.helpers.bases import write_base
from tests.helpers.digits import digits
from tests.helpers.small_run import small_config
from training.rollout.sampler import Sampler
from training.run import start
from training.run_dir.log import read_metrics

STEPS = 4
SAME = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "clip_ratio/region_mean": "clip/share",
    "sampling/sampling_logp_difference/mean": "mismatch/mean_abs",
}
COMMON = (
    "model.format=bf16", "loss.mismatch_gate=null", "rollout.temperature=0.7", "optim.learning_rate=3e-4",
    "optim.warmup_ratio=0.3", "loss.num_iterations=2",
)  # fmt: skip
CASES = {
    "dapo": ("loss.type=dapo", "loss.mask_truncated=true"),
    "grpo": (
        *("loss.type=grpo", "loss.kl_coef=0.1", "loss.entropy_coef=0.01", "loss.advantage_scale=batch"),
        "loss.mask_truncated=true",
    ),
    "gspo": (
        *("loss.type=grpo", "loss.level=sequence", "loss.clip_low=0.0003", "loss.clip_high=0.0004"),
        *("loss.correction.mode=sequence_mask", "adapter.train_norms=true"),
    ),
}


class Recorded:
    """One of our runs: its adapter before and after, and its rollouts."""

    def __init__(self, config, monkeypatch):
        self.rollouts, self._random = [], random.Random(7)
        build, sample = training.run.build_policy, Sampler.sample

        def built(engine, *rest):
            policy = build(engine, *rest)
            self._policy = policy.model
            engine.generate = lambda prompts, sampling, *_, **others: self._complete(engine, prompts, sampling)
            torch.manual_seed(1)
            with torch.no_grad():
                for tensor in adapter_tensors(self._policy).values():  # B is not 0, so noise affects A's gradient
                    tensor.add_(0.05 * torch.randn_like(tensor))
            self.before = self.adapter()
            return policy

        def recorded(*args, **kwargs):
            rollout = sample(*args, **kwargs)
            samples = [(group.prompt.ids, one) for group in rollout.groups for one in group.samples]
            logprobs = [[[logprob] for logprob in one.logprobs] for _, one in samples]
            self.rollouts.append(([ids for ids, _ in samples], [one.token_ids for _, one in samples], logprobs, None))
            return rollout

        monkeypatch.setattr(training.run, "build_policy", built)
        monkeypatch.setattr(Sampler, "sample", recorded)
        self.run_dir = start(config, "tiny").run_dir

    def adapter(self):
        return {name: tensor.detach().clone() for name, tensor in adapter_tensors(self._policy).items()}

    def _complete(self, engine, prompts, sampling):
        completions, ended = [], engine.end_token_ids
        for _ in prompts:
            ids = [self._random.randrange(5, 60) for _ in range(self._random.choice([1, 1, 2, 3, 5, 8]))]
            if self._random.random() < 0.6:
                ids[-1] = ended[0]
            completions.append(ids)
        logprobs = engine.score(prompts, completions, sampling.temperature)
        reasons = ["stop" if ids[-1] in ended else "length" for ids in completions]
        return [Completion(*row) for row in zip(completions, logprobs, reasons, strict=True)]


class Replay(GRPOTrainer):
    """TRL's trainer with recorded rollouts; it is its own `vllm_generation`."""

    _last_loaded_step = -1  # as TRL begins with an engine

    def _tokenize_prompts(self, prompts):
        return self.rollouts[0][0], None, {}

    def sync_weights(self):
        """There is nothing to sync, as nothing is sampled."""

    def generate(self, **_):
        return self.rollouts.pop(0)


def stock(config, recorded, folder):
    """(adapter, metrics of each step) of TRL's own run. Other settings are defaults of TRL or transformers."""
    base, loss, optim = config.model.base, config.loss, config.optim
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    norms = ["input_layernorm", "post_attention_layernorm"] if config.adapter.train_norms else None
    sizes = {"r": config.adapter.rank, "lora_alpha": config.adapter.alpha}
    model = get_peft_model(
        model, LoraConfig(**sizes, target_modules=list(config.adapter.targets), modules_to_save=norms)
    )
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            tensor.copy_(recorded.before[name])
    args = GRPOConfig(
        str(folder), max_steps=STEPS, per_device_train_batch_size=8, steps_per_generation=1, num_generations=4,
        num_iterations=2, max_completion_length=8, temperature=0.7, loss_type=loss.type, epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        importance_sampling_level=loss.level, beta=loss.kl_coef, entropy_coef=loss.entropy_coef,
        use_bias_correction_kl=True, scale_rewards=loss.advantage_scale,
        mask_truncated_completions=loss.mask_truncated,
        vllm_importance_sampling_mode=loss.correction.mode, vllm_importance_sampling_clip_max=2.0,
        learning_rate=3e-4, warmup_steps=0.3, lr_scheduler_type="cosine", weight_decay=optim.weight_decay,
        adam_beta2=optim.beta2, adam_epsilon=1e-4, max_grad_norm=optim.max_grad_norm, optim="adamw_torch",
        gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no",
        logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["a prompt"] * 40})
    trainer = Replay(model, digits, args, rows, processing_class=AutoTokenizer.from_pretrained(base))
    trainer.rollouts = list(recorded.rollouts)
    trainer.use_vllm, trainer.vllm_generation = True, trainer
    trainer.train()
    return adapter_tensors(model), trainer.state.log_history


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_that_of_trl(tmp_path, monkeypatch, case):
    monkeypatch.setattr("training.trainer.EPSILON", 1e-4)
    base = write_base(tmp_path / "base", hidden=32, dtype=torch.float32)
    config = small_config(base, tmp_path, *COMMON, *CASES[case], steps=STEPS)
    recorded = Recorded(config, monkeypatch)
    expected, history = stock(config, recorded, tmp_path / "stock")
    for name, tensor in recorded.adapter().items():
        moved = (tensor - recorded.before[name]).norm()
        assert moved > 1e-4
        assert (tensor - expected[name]).norm() < 1e-3 * moved
    for row, reference in zip(read_metrics(recorded.run_dir), history[:STEPS], strict=True):
        shared = [(ours, theirs) for theirs, ours in SAME.items() if theirs in reference]
        assert len(shared) >= 4
        assert row["grad_norm"] > 0 or row["step"] % 2 == 0  # in a further update every ratio may be clipped
        for ours, theirs in shared:
            assert row[ours] == pytest.approx(reference[theirs], rel=2e-3, abs=1e-5), (row["step"], ours)
