"""The trainer: TRL's GRPOTrainer (advantages, losses, optimizer) with our rollouts, correction and checkpoints.

What is overridden, and why (contracts pinned in tests/test_training_contracts.py, TRL 1.16.0):

1. `vllm_generation` is our `Rollout`: TRL has no engine that shares its base weights or syncs an adapter alone.
2. The importance weights are computed where the loss computes its logprobs (`_get_per_token_logps_and_entropies`
   inside `_compute_loss`): TRL spends a second forward pass on old logprobs that equal the current ones when there is
   one update per rollout.
3. Data order, sampling and dropout are pure functions of (seed, step), so that a killed run resumes to the same
   numbers; TRL skips through the loader instead.
4. Checkpoints are written beside and renamed, with checksums (`training/checkpoint.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import ConfigError, EngineError
from training.checkpoint import load_adapter_, write_checkpoint
from training.correction import Mismatch, importance_weights
from training.noise import derive_seed
from training.prompts import Prompts, PromptSampler
from training.rollout import Rollout
from training.run_log import RunLog, rename

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.utils.data import Sampler
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from qerl.config import RunConfig
    from training.rewards import Rewards


class QerlTrainer(GRPOTrainer):
    """See the module docstring."""

    def __init__(
        self,
        config: RunConfig,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        rewards: Rewards,
        rollout: Rollout,
        run_dir: Path,
        run_log: RunLog,
        callbacks: list[TrainerCallback],
        start_step: int = 0,
    ) -> None:
        """`start_step` is the optimizer step that a resumed run continues at."""
        self._config = config
        self._prompts = prompts
        self._rollout = rollout
        self._run_dir = run_dir
        self._run_log = run_log
        self._start_step = start_step
        self._loss_inputs: dict[str, Any] | None = None
        self._mismatch = Mismatch()
        self._gate_passed = False
        self._step_metrics: dict[str, float] = {}
        super().__init__(
            model=policy,
            reward_funcs=rewards.functions,
            args=trl_config(config, run_dir, rewards.weights),
            train_dataset=prompts.dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.use_vllm = True  # TRL's switch for "completions come from elsewhere, with sampling logprobs"
        self.vllm_generation = rollout
        self.vllm_importance_sampling_correction = False  # on inside `_compute_loss` alone, see 2 above
        self._last_loaded_step = -1

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
        started = time.perf_counter()
        self._rollout.step, self._rollout.history = self.state.global_step, self.state.log_history
        # Everything random until the next rollout (shuffling of micro-batches, dropout) follows from (seed, step).
        torch.manual_seed(derive_seed(self._config.run.seed, self.state.global_step, "training"))
        output = super()._generate_and_score_completions(inputs)
        stats = self._rollout.stats
        # The second counts rollout, grading and, with several iterations, the old logprobs.
        self._step_metrics = {**stats.metrics, "time/rollout_and_grading_s": time.perf_counter() - started}
        return output

    # -- loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._loss_inputs = inputs
        self.vllm_importance_sampling_correction = self._config.loss.correction.mode != "off"
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
            self.vllm_importance_sampling_correction = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:
            self._weigh(output[0].detach(), self._loss_inputs)
        return output

    def _weigh(self, logprobs: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Put the importance weights of one micro-batch beside it, and count its mismatch."""
        correction = self._config.loss.correction
        old, sampling = inputs.get("old_per_token_logps", logprobs), inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"]
        if correction.mode != "off":
            inputs["importance_sampling_ratio"] = importance_weights(old, sampling, mask, correction)
        self._mismatch.add(old, sampling, mask, correction)

    def _check_gate(self) -> None:
        """Before the first update that has tokens, engine and trainer must agree on their logprobs."""
        gate = self._config.loss.mismatch_gate
        # Noise and dropout make the policies differ, however well they agree.
        clean = self._step_metrics.get("noise/sigma", 0.0) == 0 and self._config.adapter.dropout == 0
        if gate is None or self._gate_passed or not clean or not self._mismatch.tokens:
            return
        if not self._mismatch.mean_kl <= gate:
            raise EngineError(
                f"engine and trainer disagree before the first update: mismatch_kl {self._mismatch.mean_kl:.2e} is "
                f"above loss.mismatch_gate {gate:g}. Check that both loaded the same base, that the adapter was "
                "synced and that top_p is 1; raise the gate only if the difference is known"
            )
        self._gate_passed = True

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise EngineError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}: lower optim.learning_rate or "
                f"optim.max_grad_norm, and resume from the last checkpoint in {self._run_dir}"
            )
        if self.accelerator.sync_gradients:  # the step's last micro-batch: the update comes next
            self._check_gate()
        return loss

    # -- logging and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One dict a step, in our names, for metrics.jsonl and every tracker."""
        if "loss" not in logs:  # the closing summary of transformers' Trainer repeats what the steps said
            return
        self._check_gradient(logs.get("grad_norm"))
        averages = {key: _mean(values) for key, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        step_metrics = {**self._step_metrics, **self._mismatch.metrics(self._config.loss.correction)}
        self._mismatch = Mismatch()
        metrics = rename({**logs, **averages, **step_metrics})
        metrics["time/train_s"] = metrics["time/step_s"] - metrics.pop("time/rollout_and_grading_s", 0.0)
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30  # of this step alone
            torch.cuda.reset_peak_memory_stats()
        # A further update on the same rollout has its noise, but took no time for it.
        self._step_metrics = {key: value for key, value in self._step_metrics.items() if key.startswith("noise/")}
        # A tracker cannot draw what is not finite; metrics.jsonl says null.
        Trainer.log(self, {key: value for key, value in metrics.items() if value is not None}, start_time)
        self._run_log.write_step(self.state.global_step, metrics)
        self._sample_completions()

    def _check_gradient(self, norm: float | None) -> None:
        """The update with this gradient has been made, but nothing of it is on disk yet."""
        if norm is not None and not math.isfinite(norm):
            raise EngineError(
                f"the gradient of step {self.state.global_step} is {norm}, and its update broke the adapter: lower "
                f"optim.learning_rate, and resume from the last checkpoint in {self._run_dir}"
            )

    def _sample_completions(self) -> None:
        step, config = self.state.global_step, self._config.logging
        if config.completions_count and (step == 1 or step % config.completions_every == 0):
            self._run_log.write_completions(step, self._completion_rows()[: config.completions_count])

    def _completion_rows(self) -> list[dict[str, Any]]:
        """The latest rollout: prompt, completion, rewards by name, advantage."""
        logs, names = self._logs, list(self._logs["rewards"])
        columns = [logs["prompt"], logs["completion"], logs["advantages"], *(logs["rewards"][name] for name in names)]
        return [
            {
                "prompt": row[0],
                "completion": row[1],
                "advantage": row[2],
                "rewards": dict(zip(names, row[3:], strict=True)),
            }
            for row in zip(*columns, strict=True)
        ]

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        self._rollout.clear_noise()
        write_checkpoint(self, self._run_dir, self._config)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        load_adapter_(self.model, Path(resume_from_checkpoint))


def _mean(values: list[float]) -> float | None:
    """Mean over the step's micro-batches of what is not NaN; None if nothing is left."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None


def trl_config(config: RunConfig, run_dir: Path, reward_weights: list[float]) -> GRPOConfig:
    """The recipe in TRL's words. One generation serves one optimizer step, or `num_iterations` of them."""
    rollout, loss, optim, run = config.rollout, config.loss, config.optim, config.run
    on_gpu = torch.cuda.is_available()
    accumulation = rollout.prompts_per_step * rollout.group_size // run.micro_batch
    return GRPOConfig(
        output_dir=str(run_dir),
        max_steps=run.steps,
        seed=run.seed,
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=rollout.group_size,
        num_iterations=loss.num_iterations,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        loss_type=loss.type,
        importance_sampling_level=loss.level,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        delta=loss.delta,
        beta=loss.kl_coef,
        scale_rewards=loss.advantage_scale,
        mask_truncated_completions=loss.mask_truncated,
        entropy_coef=loss.entropy_coef,
        vllm_importance_sampling_mode=loss.correction.mode if loss.correction.mode != "off" else "token_truncate",
        reward_weights=reward_weights,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        warmup_steps=optim.warmup_ratio,
        lr_scheduler_type=optim.schedule if optim.schedule != "constant" else "constant_with_warmup",
        optim=_optimizer_name(optim.name, on_gpu),
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=on_gpu and config.model.dtype != "float32",
        use_cpu=not on_gpu,
        save_strategy="steps",
        save_steps=run.save_every,
        ignore_data_skip=True,  # the sampler starts at the resumed step itself
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run
        report_to=_trackers(config.logging.report_to) or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def _trackers(names: Sequence[str]) -> list[str]:
    """The trackers asked for. Raises ConfigError for one that is not installed."""
    import importlib.util

    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logging.report_to names {name}, which is not installed: run `pip install {name}`, or leave it out "
                "(metrics.jsonl is written in any case)"
            )
    return list(names)


def _optimizer_name(name: str, on_gpu: bool) -> str:
    import importlib.util

    has_8bit = on_gpu and importlib.util.find_spec("bitsandbytes") is not None
    if name == "adamw_8bit" and not has_8bit:
        raise EngineError(
            "optim.name is adamw_8bit, which needs a CUDA device and bitsandbytes (`pip install 'qerl[gpu]'`): "
            "write adamw, or auto to take it where it runs"
        )
    return "adamw_bnb_8bit" if name == "adamw_8bit" or (name == "auto" and has_8bit) else "adamw_torch"
