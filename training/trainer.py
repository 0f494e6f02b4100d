"""The trainer of runs that sample: transformers' training loop and TRL's losses around the step of `training/step.py`.

transformers' Trainer keeps the loop, the optimizer, its schedule, gradient clipping, callbacks and trackers; TRL's
GRPOTrainer keeps the losses. The step is ours, because TRL has no engine that shares its base weights, syncs every
weight instead of the adapter, pads rows and cuts them by number, and spends a second forward pass on old logprobs that
equal the current ones. Where the two meet (TRL 1.16.0, transformers 5.17.0; held by tests/training/test_contracts.py):

    get_train_dataloader     the prompts of each step, which depend on (seed, step) alone; a resumed run continues there
    _prepare_inputs          a step's inputs: `collect` samples, grades and pads them, once for `num_iterations` steps
    _get_per_token_logps_... TRL's loss asks its model for logprobs; its model is here the logprobs themselves

and in `run_trainer.py`, for every kind of run:

    create_optimizer         bfloat16 masters are rounded at random after each update (training/policy/rounding.py)
    compute_loss             forward and backward of the whole step: `backward`
    training_step            what stops a run before a bad update is made
    evaluate                 a validation, where the recipe asks for one (training/validation)
    _clip_grad_norm, ...     of ranks that share masters out each has a part of the optimizer (shared_optimizer.py)
    log, _save_checkpoint    one dict per step in our names; checkpoints that survive a kill (training/run_dir)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from qerl.checkpoint.adapter import keep_expert_reference_
from training.distill.divergence import LOSS_TYPE, distillation_loss
from training.loss.correction import mean_k3
from training.loss.gates import MismatchGate, rounding_causes
from training.rollout.prompts import StepPrompts, step_prompts
from training.rollout.sampler import Moment
from training.run_dir.log import completion_rows, spread
from training.run_trainer import RunTrainer
from training.step import Collected, Objective, collect
from training.trial_adapter import try_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from trl import GRPOConfig

    from training.loss.batch import Batch, LossInputs
    from training.loss.micro_batches import Metrics
    from training.parts import Parts
    from training.rollout.groups import Prompt
    from training.validation.validation import Validation


class Logprobs(NamedTuple):
    """What TRL's loss is given as its model: the logprobs and entropies (B, T) that it would ask a model for."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


class TrialAtStart(TrainerCallback):
    """Tries the adapter before a run's first step, and before the validation that may come first."""

    def __init__(self, parts: Parts, gate: MismatchGate) -> None:
        self._parts, self._gate = parts, gate

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            try_adapter(self._parts, self._gate)


class QerlTrainer(RunTrainer, GRPOTrainer):
    """See the module docstring."""

    parts: Parts

    def __init__(
        self,
        parts: Parts,
        args: GRPOConfig,
        callbacks: list[TrainerCallback],
        start_step: int = 0,
        validation: Validation | None = None,
    ) -> None:
        """`args` are those of `trl_config`; `start_step` is the optimizer step that a resumed run continues at."""
        config = parts.config
        self.parts, self._start_step, self.validation = parts, start_step, validation
        self._collected: Collected | None = None
        # With several updates per rollout old logprobs are scored, without dropout.
        dropout = config.adapter.dropout if config.loss.num_iterations == 1 else 0.0
        self.gate = MismatchGate(config.loss.mismatch_gate, dropout, rounding_causes(config))
        super().__init__(
            model=parts.policy.model,
            reward_funcs=parts.rewards.functions,  # TRL wants some; `training.rewards` calls them
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [prompt.text for prompt in parts.prompts[:1]]}),  # likewise
            processing_class=parts.tokenizer,
            callbacks=[*callbacks, *([validation] if validation else []), TrialAtStart(parts, self.gate)],
        )
        keep_expert_reference_(parts.policy.model)
        # TRL's switches for "the loss is multiplied by importance weights".
        self.use_vllm = True
        self.vllm_importance_sampling_correction = config.loss.correction.mode != "off"

    # -- a step's inputs

    def get_train_dataloader(self) -> StepPrompts:
        return step_prompts(self.parts.config, self.parts.prompts, self._start_step, self.parts.curriculum)

    def _prepare_inputs(self, prompts: list[Prompt]) -> Batch:
        step = self.state.global_step
        if self._collected is None or step % self.parts.config.loss.num_iterations == 0:
            self._collected = collect(self.parts, prompts, Moment(step, self.state.log_history))
            self.state.num_input_tokens_seen += self._collected.tokens
        return self._collected.batch

    # -- the loss

    def objective(self) -> Objective:
        """TRL's loss, or the divergence from a teacher."""
        if self.parts.teacher is not None:
            return Objective(distillation_loss, LOSS_TYPE)
        loss = self.parts.config.loss
        return Objective(self.loss_of, loss.type, advantage_only=loss.kl_coef == 0 and loss.entropy_coef == 0)

    def loss_of(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """TRL's loss of one micro-batch, and the metrics that TRL logs of it."""
        rows = inputs.rows
        given = {
            "prompt_ids": rows.prompt_ids_B_L,
            "prompt_mask": rows.prompt_mask_B_L,
            "completion_ids": rows.completion_ids_B_T,
            "completion_mask": rows.loss_mask_B_T,
            "advantages": rows.advantages_B,
            "num_items_in_batch": inputs.step_tokens,
            "old_per_token_logps": rows.old_logprobs_B_T,
            "sampling_per_token_logps": rows.sampling_logprobs_B_T,
            "ref_per_token_logps": rows.reference_logprobs_B_T,
            "importance_sampling_ratio": inputs.weights,
        }
        self.entropy_coef = inputs.entropy_coef
        self._metrics["train"].clear()  # of the micro-batch before, and the seconds that TRL adds to each step
        loss = self._compute_loss(Logprobs(inputs.logprobs_B_T, inputs.entropies_B_T), given)
        metrics = {name: values for name, values in self._metrics["train"].items() if name != "entropy_coef"}
        if rows.old_logprobs_B_T is not None:
            metrics["update_kl"] = [mean_k3(inputs.logprobs_B_T.detach(), rows.old_logprobs_B_T, rows.loss_mask_B_T)]
        return loss, metrics

    def _get_per_token_logps_and_entropies(
        self, model: Logprobs, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        return model.logprobs, model.entropies, None

    # -- around an update

    def before_update(self) -> None:
        sigma = self._collected.metrics.get("noise/sigma", 0.0)
        older = self._collected.metrics.get("carry_over/old_tokens_share", 0.0) > 0
        self.gate.check(self._result.mismatch, sigma, self.state.log_history, older)

    def before_saving(self) -> None:
        self.parts.sampler.clear_noise()

    def write_besides(self, folder: Path) -> None:
        if self.parts.carry_over is not None:
            self.parts.carry_over.save(folder, self.state.global_step)
        if self.parts.curriculum is not None:
            self.parts.curriculum.save(folder, self.state.global_step // self.parts.config.loss.num_iterations)
        if (calibration := self.parts.sampler.calibration) is not None:
            calibration.save(folder)

    def read_besides(self, folder: Path) -> None:
        if self.parts.carry_over is not None:
            self.parts.carry_over.load(folder, self._start_step)
        if self.parts.curriculum is not None:
            self.parts.curriculum.load(folder)
        if (calibration := self.parts.sampler.calibration) is not None:
            calibration.load(folder)

    # -- logging

    def step_metrics(self) -> dict[str, float]:
        """The metrics of the rollout, and how far the sampler was from the policy."""
        return {**self._rollout_metrics(), **self._result.mismatch.metrics(self.parts.config.loss.correction)}

    def _rollout_metrics(self) -> dict[str, float]:
        """The metrics of the rollout; a further update on the same rollout repeats those of its noise alone."""
        metrics, updates = self._collected.metrics, self.parts.config.loss.num_iterations
        if (self.state.global_step - 1) % updates == 0:
            return {**metrics, "tokens_total": float(self.state.num_input_tokens_seen)}
        return {key: value for key, value in metrics.items() if key.startswith("noise/")}

    def after_logging(self, step: int) -> None:
        config = self.parts.config.logging
        if config.completions_count and (step == 1 or step % config.completions_every == 0):
            rows = completion_rows(self._collected.groups, self._collected.advantages_P_G, self.parts.rewards)
            self.parts.log.write_completions(step, spread(rows, config.completions_count))
