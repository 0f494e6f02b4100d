"""What we lean on in TRL 1.16.0 and transformers 5.17.0: an upgrade that changes it fails here and says where."""

import inspect

import pytest
from transformers import Trainer
from trl import GRPOTrainer


@pytest.mark.parametrize(
    ("method", "lines"),
    [
        # the seam: what our Rollout has to answer, and when it is asked
        (
            GRPOTrainer._generate_single_turn,
            (
                "if self.state.global_step != self._last_loaded_step:",
                "self.vllm_generation.sync_weights()",
                "_, completion_ids, logprobs, _ = self.vllm_generation.generate(",
                "prompts=prompt_ids,",
                "num_generations=num_generations,",
                "logprobs = [[lp[0] for lp in seq] for seq in logprobs]",
            ),
        ),
        # sampling logprobs reach the loss whether or not TRL's own correction is on
        (
            GRPOTrainer._generate_and_score_completions,
            (
                'output["sampling_per_token_logps"] = sampling_per_token_logps',
                "self.use_vllm and self.vllm_importance_sampling_correction",
            ),
        ),
        # the weights are read after the logprobs were computed, from the same dict
        (
            GRPOTrainer._compute_loss,
            (
                "self._get_per_token_logps_and_entropies(",
                "if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type",
                'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
            ),
        ),
        # a rollout serves `steps_per_generation * num_iterations` calls
        (GRPOTrainer._prepare_inputs, ("generate_every = self.args.steps_per_generation * self.num_iterations",)),
        # what it asks of its logprobs, and that outside the loss it asks without a gradient
        (
            GRPOTrainer._generate_and_score_completions,
            ("with torch.no_grad(), disable_gradient_checkpointing(", "self._get_per_token_logps_and_entropies("),
        ),
        # a step's loss is what compute_loss returns, differentiated once
        (
            Trainer.training_step,
            ("loss = self.compute_loss(model, inputs", "self.accelerator.backward(loss, **kwargs)"),
        ),
        (Trainer._init_training_state, ("if not self.args.ignore_data_skip:",)),
    ],
    ids=lambda value: value.__qualname__ if callable(value) else "",
)
def test_upstream_still_reads_as_we_lean_on_it(method, lines):
    source = inspect.getsource(method)
    position = 0
    for line in lines:
        assert line in source[position:], f"{method.__qualname__} no longer has: {line}"
        position = source.index(line, position) if method is GRPOTrainer._compute_loss else 0


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (GRPOTrainer, "_tokenize_prompts", ["self", "prompts"]),
        (GRPOTrainer, "_compute_loss", ["self", "model", "inputs"]),
        (GRPOTrainer, "compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        (GRPOTrainer, "_get_train_sampler", ["self", "dataset"]),
        (GRPOTrainer, "_generate_and_score_completions", ["self", "inputs"]),
        (GRPOTrainer, "log", ["self", "logs", "start_time"]),
        (Trainer, "_save_checkpoint", ["self", "model", "trial"]),
        (Trainer, "_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        (Trainer, "_save_optimizer_and_scheduler", ["self", "output_dir"]),
        (Trainer, "_save_rng_state", ["self", "output_dir"]),
    ],
)
def test_what_we_override_or_call_has_the_same_parameters(owner, name, parameters):
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters
