"""The trainer: TRL's GRPOTrainer (advantages, losses, optimizer) with our rollouts, correction and checkpoints.

What is overridden, and why (contracts pinned in tests/training/test_contracts.py, TRL 1.16.0):

1. `vllm_generation` is our `Rollout`: TRL has no engine that shares its base weights or syncs an adapter alone.
2. The importance weights are computed where the loss computes its logprobs (`_get_per_token_logps_and_entropies`
   inside `_compute_loss`): TRL spends a second forward pass on old logprobs that equal the current ones when there is
   one update per rollout.
3. A step is one batch for TRL, cut by tokens into micro-batches here (`compute_loss`), each packed into one row
   without padding; rows without a loss are left out, and metrics are over the others. TRL pads and cuts by rows.
4. Data order, sampling and dropout are pure functions of (seed, step), so that a killed run resumes to the same
   numbers; TRL skips through the loader instead.
5. With dynamic sampling the groups are sampled and graded before TRL scores them (`training/rollout/group_sampler.py`),
   and TRL is given those that were kept.
6. Checkpoints are written beside and renamed, with checksums (`training/run_dir/checkpoint.py`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from trl import GRPOTrainer

from training.loss.advantages import clear_equal_groups_
from training.loss.correction import Mismatch, MismatchGate, importance_weights
from training.loss.finite import check_gradient, check_loss
from training.loss.micro_batches import MicroBatch, merge_metrics, row_metrics, split
from training.parts import TrainerParts
from training.policy.packed_policy import PackedPolicy
from training.policy.packing import pack
from training.policy.train_memory import make_gradients_, training_memory
from training.rollout.group_sampler import GroupSampler
from training.rollout.noise import derive_seed
from training.rollout.prompts import PromptSampler
from training.run_dir.checkpoint import load_adapter_, write_checkpoint
from training.run_dir.log import completion_rows, means, rename, spread
from training.run_dir.phase_times import PhaseTimes
from training.run_dir.prolong import set_rates_
from training.trl_config import trl_config

if TYPE_CHECKING:
    from torch.utils.data import Sampler
    from transformers import TrainerCallback

    from training.rollout.dynamic_sampling import Group


class QerlTrainer(GRPOTrainer):
    """See the module docstring."""

    def __init__(self, parts: TrainerParts, callbacks: list[TrainerCallback], start_step: int = 0) -> None:
        """`start_step` is the optimizer step that a resumed run continues at."""
        config = parts.config
        self._config, self._plan = config, parts.plan
        self._prompts, self._rollout = parts.prompts, parts.rollout
        self._run_dir, self._run_log = parts.run_dir, parts.run_log
        self._start_step = start_step
        self._loss_inputs: dict[str, Any] | None = None
        self._mismatch = Mismatch()
        self._unread: list[tuple[torch.Tensor, ...]] = []  # `_mismatch` counts it when the GPU has done the step
        self._gate = MismatchGate(config.loss.mismatch_gate, config.adapter.dropout)
        self._step_metrics: dict[str, float] = {}
        self._packed = PackedPolicy(
            parts.policy,
            config.rollout.temperature,
            parts.plan,
            entropy_gradient=config.loss.entropy_coef > 0,
            deterministic=config.rollout.deterministic,
        )
        self._totals = torch.empty(0, config.rollout.group_size)  # weighted rewards (P, G) of the latest rollout
        self._kept: list[Group] | None = None  # dynamic sampling: groups that TRL is given instead of sampling
        super().__init__(
            model=parts.policy,
            reward_funcs=parts.rewards.functions,
            args=trl_config(config, parts.run_dir, parts.rewards.weights),
            train_dataset=parts.prompts.dataset,
            processing_class=parts.tokenizer,
            callbacks=callbacks,
        )
        self.use_vllm = True  # TRL's switch for "completions come from elsewhere, with sampling logprobs"
        self.vllm_generation = parts.rollout
        self.vllm_importance_sampling_correction = False  # on inside `_compute_loss` alone, see 2 above
        self._last_loaded_step = -1
        self._times = PhaseTimes(self.accelerator.device)

    # -- data and rollouts

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        rollout, run = self._config.rollout, self._config.run
        per_rollout = self._config.loss.num_iterations
        return PromptSampler(
            rows=len(self._prompts.dataset),
            prompts_per_step=rollout.prompts_per_step,
            group_size=rollout.group_size,
            repeats=per_rollout * self.args.steps_per_generation,
            rollouts=math.ceil(run.steps / per_rollout),
            seed=run.seed,
            start=self._start_step // per_rollout,
        )

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        return [self._prompts.ids_by_text[prompt] for prompt in prompts], None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started, step = time.perf_counter(), self.state.global_step
        self._rollout.begin_step(step, self.state.log_history)
        # Everything random until the next rollout (shuffling of micro-batches, dropout) follows from (seed, step).
        torch.manual_seed(derive_seed(self._config.run.seed, step, "training"))
        sampling_metrics = {}
        if self._config.rollout.dynamic_sampling.enabled:
            sampler = GroupSampler(self, self._config)
            batch = sampler.fill([row["row"] for row in inputs[:: self.num_generations]], step)
            self._kept, sampling_metrics = batch.kept, sampler.metrics(batch)
            inputs = sampler.inputs([group.row for group in batch.kept])
        else:
            self.expect_answers(inputs)
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._kept = None
        self._clear_equal_groups_(output["advantages"])
        self._step_metrics = {
            **self._rollout.metrics(),
            **sampling_metrics,
            # rollout, grading and, with several iterations, the old logprobs
            "time/rollout_and_grading_s": time.perf_counter() - started,
        }
        return output

    def expect_answers(self, inputs: list[dict[str, Any]]) -> None:
        """Tell the rollout the answers to what it samples next: a batch, as TRL has it."""
        self._rollout.answers = [self._prompts.examples[row["row"]].answer for row in inputs]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list, list]:
        if self._kept is None:
            self._run_log.phase("rollout")
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        kept = self._kept
        return [ids for group in kept for ids in group.completion_ids], [
            row for group in kept for row in group.logprobs
        ]

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        if self._kept is None:
            self._run_log.phase("grading")
            with self._times.phase("reward"):
                rewards = super()._calculate_rewards(*args)
        else:
            rewards = torch.cat([group.rewards for group in self._kept]).to(self.accelerator.device)
        self._totals = (rewards * self.reward_weights.to(rewards.device)).sum(1).view(-1, self.num_generations)
        return rewards

    def _clear_equal_groups_(self, advantages: torch.Tensor) -> None:
        share = clear_equal_groups_(advantages, self._totals)
        self._metrics["train"]["frac_reward_zero_std"] = [share]
        self._logs["advantages"].extend(advantages.tolist())  # it holds one rollout's

    # -- loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._loss_inputs = inputs
        self.vllm_importance_sampling_correction = self._config.loss.correction.mode != "off"
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
            self.vllm_importance_sampling_correction = False

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a whole step; of the loss that is returned nothing is left to differentiate."""
        self._run_log.phase("training")
        loss = self._config.loss
        advantage_only = loss.kl_coef == 0 and loss.entropy_coef == 0
        batches = split(inputs, self._plan.micro_batch_tokens, loss.type, advantage_only)
        total = torch.zeros((), device=self.accelerator.device)
        parts, self._unread = [], []
        with self._packed.training(), training_memory(self._plan) as memory:
            make_gradients_(model)
            for batch in batches:
                total += self._train_micro_batch(model, batch, parts)
        for values in self._unread:
            self._mismatch.add(*values, self._config.loss.correction)
        metrics = merge_metrics(parts, row_metrics(loss.type, loss.level))
        self._step_metrics |= metrics | memory.metrics
        if self._packed.planned:  # nothing bounds a CPU, and nothing is planned there
            self._step_metrics["memory/train_planned_gib"] = self._packed.planned / 2**30
        rows = sum(batch.rows for batch in batches)
        self._step_metrics["completions/trained_share"] = rows / len(inputs["completion_mask"])
        return total.requires_grad_()

    def _train_micro_batch(self, model: torch.nn.Module, batch: MicroBatch, parts: list) -> torch.Tensor:
        """Add one micro-batch's gradient; returns its part of the step's loss, and appends its metrics to `parts`."""
        step_metrics, entropy_coef = self._metrics["train"], self.entropy_coef
        self._metrics["train"] = defaultdict(list)
        self.entropy_coef = entropy_coef * batch.token_share / batch.loss_share
        row = pack(batch.ids, batch.mask, batch.width, self.accelerator.device)  # the GPU is at the one before
        try:
            with self._times.phase("forward"):
                loss = self._compute_loss(model, batch.inputs | {"packed_row": row}) * batch.loss_share
            parts.append((batch, self._metrics["train"]))
        finally:
            self._metrics["train"], self.entropy_coef = step_metrics, entropy_coef
        parts[-1][1].pop("entropy_coef", None)  # the scaled one
        with self._times.phase("backward"):  # what recomputes does it here
            self.accelerator.backward(loss)
        return loss.detach()

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's: (logprobs, entropies, no router loss), (B, logits_to_keep); outside the loss without gradient."""
        inputs, tokens = self._loss_inputs, (input_ids, attention_mask, logits_to_keep)
        with self.accelerator.autocast():
            if inputs is None:
                with self._times.phase("forward"):
                    logprobs, entropies = self._packed.score(*tokens)
            else:
                logprobs, entropies = self._packed.logprobs(*tokens, inputs.get("packed_row"))
                self._weigh(logprobs.detach(), inputs)
        return logprobs, entropies if compute_entropy else None, None

    def _weigh(self, logprobs: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Put the importance weights of one micro-batch beside it, and keep what its mismatch is counted from."""
        correction = self._config.loss.correction
        old, sampling = inputs.get("old_per_token_logps", logprobs), inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"]
        if correction.mode != "off":
            inputs["importance_sampling_ratio"] = importance_weights(old, sampling, mask, correction)
        self._unread.append((old, sampling, mask))

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self._times.begin_step()
        loss = super().training_step(model, inputs, num_items_in_batch)
        check_loss(loss, self.state.global_step + 1, self._run_dir)
        sigma = self._step_metrics.get("noise/sigma", 0.0)
        self._gate.check(self._mismatch, sigma, self.state.log_history)  # the update comes next
        self._times.begin("optimizer")  # until `log`, with the clipping of the gradient
        if not self.optimizer.state:
            # Made in this update, it would lie in what the micro-batches had, which torch could not give back then.
            torch.cuda.empty_cache()
        return loss

    # -- logging and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One dict a step, in our names, for metrics.jsonl and every tracker."""
        if "loss" not in logs:  # the closing summary of transformers' Trainer repeats what the steps said
            return
        self._times.end()
        check_gradient(logs.get("grad_norm"), self.state.global_step, self._run_dir)
        averages = means(self._metrics["train"])
        self._metrics["train"].clear()
        step_metrics = {**self._step_metrics, **self._mismatch.metrics(self._config.loss.correction)}
        self._mismatch = Mismatch()
        rollout_and_grading_s = step_metrics.pop("time/rollout_and_grading_s", 0.0)
        counted_s = sum(step_metrics.get(key, 0.0) for key in ("time/rollout_s", "time/sync_s"))
        metrics = rename({**logs, **averages, **step_metrics}) | self._times.metrics(counted_s)
        metrics["time/train_s"] = metrics["time/step_s"] - metrics["time/optimizer_s"] - rollout_and_grading_s
        if card := [metrics[key] for key in metrics if key.endswith("_card_gib")]:
            metrics["memory/peak_gib"] = max(card)  # of this step
        # A further update on the same rollout has its noise, but took no time for it.
        self._step_metrics = {key: value for key, value in self._step_metrics.items() if key.startswith("noise/")}
        # A tracker cannot draw what is not finite; metrics.jsonl says null.
        Trainer.log(self, {key: value for key, value in metrics.items() if value is not None}, start_time)
        self._run_log.write_step(self.state.global_step, metrics)
        self._sample_completions()

    def _sample_completions(self) -> None:
        step, config = self.state.global_step, self._config.logging
        if config.completions_count and (step == 1 or step % config.completions_every == 0):
            self._run_log.write_completions(step, spread(completion_rows(self._logs), config.completions_count))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        self._run_log.phase("saving")
        self._rollout.clear_noise()
        write_checkpoint(self, self._run_dir, self._config)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            set_rates_(self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        load_adapter_(self.model, Path(resume_from_checkpoint))
