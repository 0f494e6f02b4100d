"""The trainer of every run: transformers' training loop and TRL's losses around the step of `training/step.py`.

transformers' Trainer keeps the loop, the optimizer, its schedule, gradient clipping, callbacks and trackers; TRL's
GRPOTrainer keeps the losses. The step is ours, because TRL has no engine that shares its base weights, syncs every
weight instead of the adapter, pads rows and cuts them by number, and spends a second forward pass on old logprobs that
equal the current ones. The overrides stand in the order in which they are called (TRL 1.16.0, transformers 5.17.0; held
by tests/training/test_contracts.py):

    get_train_dataloader     the prompts of each step, which depend on (seed, step) alone; a resumed run continues there
    create_optimizer         bfloat16 masters are rounded at random after each update (training/policy/rounding.py)
    _load_...                what a resumed run takes over from its checkpoint
    training_step            what stops a run before a bad update is made
    _prepare_inputs          a step's inputs: `collect` samples, grades and pads them, once for `num_iterations` steps
    compute_loss             forward and backward of the whole step: `backward`
    _get_per_token_logps_... TRL's loss asks its model for logprobs; its model is here the logprobs themselves
    _clip_grad_norm          ranks that share masters each have a part of the optimizer (training/policy/shards.py)
    log                      one dict per step in our names
    evaluate                 a validation, where the recipe asks for one (training/validation)
    _save_checkpoint         checkpoints that survive a kill (training/run_dir)

A run on given conversations samples nothing: its step takes the next rows (training/sft_step.py), and its loss is not
TRL's. All else is the same.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from trl import GRPOConfig, GRPOTrainer

from qerl.base.errors import EngineError
from qerl.base.parallel import ALONE
from qerl.checkpoint.adapter import keep_expert_reference_
from qerl.plan.trained import masters_dtype
from qerl.report.metrics import rename
from training.loss.correction import mean_k3
from training.loss.gates import MismatchGate, check_finite, check_trained, rounding_causes
from training.ranks import check_replicas
from training.run_dir.checkpoint import write_checkpoint
from training.run_dir.log import completion_rows, spread
from training.run_dir.result import settle_best
from training.run_dir.resume import set_rates_
from training.step import Collected, StepResult, backward
from training.trial_adapter import try_adapter

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from training.loss.batch import Batch, LossInputs, Metrics
    from training.parts import Parts, TrainingParts
    from training.policy.shards import Answer
    from training.rollout.prompts import StepPrompts
    from training.validate import Validation


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


def graded_elsewhere(**_: object) -> list[float]:
    """The reward function that TRL wants to be given. `training/rewards` grades."""
    raise NotImplementedError


class QerlTrainer(GRPOTrainer):
    """See the module docstring."""

    def __init__(
        self,
        parts: TrainingParts,
        args: GRPOConfig,
        callbacks: list[TrainerCallback],
        start_step: int = 0,
        validation: Validation | None = None,
    ) -> None:
        """`args` come from `trl_config`; `start_step` is the optimizer step that a resumed run continues at."""
        config = parts.config
        self.parts, self._start_step, self.validation = parts, start_step, validation
        self._collected: Collected | None = None
        self._result: StepResult | None = None
        self._unwritten: Metrics | None = None  # of the step that is validated
        # With several updates per rollout old logprobs are scored, without dropout.
        dropout = config.adapter.dropout if config.loss.num_iterations == 1 else 0.0
        self.gate = MismatchGate(config.loss.mismatch_gate, dropout, rounding_causes(config))
        own = [validation] if validation else []
        super().__init__(
            model=parts.policy.model,
            reward_funcs=[graded_elsewhere],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL wants one
            processing_class=parts.tokenizer,
            callbacks=[*callbacks, *own, *([TrialAtStart(parts, self.gate)] if config.kind.samples else [])],
        )
        keep_expert_reference_(parts.policy.model)
        # TRL's switches for "the loss is multiplied by importance weights".
        self.use_vllm = True
        self.vllm_importance_sampling_correction = config.loss.correction.mode != "off"

    # -- before the first step

    def get_train_dataloader(self) -> StepPrompts:
        return self.parts.steps(self._start_step)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """transformers' choice; around it, for masters in bfloat16, what rounds them at random."""
        optimizer, config = super().create_optimizer(model), self.parts.config
        if not config.kind.has_adapter and masters_dtype(config.qat) == "bfloat16":
            from training.policy.rounding import RandomlyRounded

            self.optimizer = optimizer = RandomlyRounded(optimizer, config.run.seed)
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        self.parts.policy.load(folder)
        self.parts.load(folder, self._start_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        shards = self.parts.policy.shards
        if checkpoint is not None and shards is not None:
            read = partial(torch.load, map_location="cpu", weights_only=True)
            whole = read(Path(checkpoint) / OPTIMIZER_NAME, mmap=True)
            self.optimizer.load_state_dict(shards.own_state(self.optimizer, whole))
            self.lr_scheduler.load_state_dict(read(Path(checkpoint) / SCHEDULER_NAME))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            set_rates_(self.lr_scheduler)

    # -- a step

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        times = self.parts.times
        times.begin_step()
        loss = super().training_step(model, inputs, num_items_in_batch)
        check_finite(loss.item(), "loss", self.state.global_step + 1, self.parts.run_dir)
        found = self._collected.metrics
        older = found.get("carry_over/old_tokens_share", 0.0) > 0
        self.gate.check(self._result.mismatch, found.get("noise/sigma", 0.0), self.state.log_history, older)
        times.begin("optimizer")  # until `log`, with the clipping of the gradient
        if not self.optimizer.state:
            # This update allocates it. In cached blocks of the micro-batches it would keep torch from freeing them.
            torch.cuda.empty_cache()
        return loss

    def _prepare_inputs(self, generation_batch: list[Any]) -> Batch:
        """The batch of prompts, or of given rows."""
        step = self.state.global_step
        if self._collected is None or step % self.parts.config.loss.num_iterations == 0:
            self._collected = self.parts.collect(generation_batch, step)
            self.state.num_input_tokens_seen += self._collected.tokens
        return self._collected.batch

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a whole step. The loss that is returned has no graph any more."""
        objective = self.parts.objective(self.loss_of)
        self._result = backward(self.parts, inputs, objective, self.accelerator.backward)
        return self._result.loss.requires_grad_()

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

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if (shards := self.parts.policy.shards) is None:
            return super()._clip_grad_norm(model)
        return shards.clip_(self.optimizer, self.args.max_grad_norm)

    # -- after an update: its log, a validation, a checkpoint

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One dict per step, in our names, for metrics.jsonl and every tracker."""
        if "loss" not in logs:  # the closing summary of transformers' Trainer repeats what the steps said
            return
        parts, step = self.parts, self.state.global_step
        parts.times.end()
        check_finite(logs.get("grad_norm"), "gradient", step, parts.run_dir)
        mismatch = self._result.mismatch.metrics(parts.config.loss.correction)
        metrics = {**logs, **self._collected_metrics(), **mismatch, **self._result.metrics}
        before_s = metrics.pop("time/rollout_and_grading_s", 0.0)
        counted_s = sum(metrics.get(key, 0.0) for key in ("time/rollout_s", "time/switch_s", "time/sync_s"))
        metrics = rename(metrics) | parts.times.metrics(counted_s)
        metrics["time/train_s"] = metrics["time/step_s"] - metrics["time/optimizer_s"] - before_s
        if not self.parts.config.kind.samples:
            metrics["speed/tokens_per_s"] = self._collected.tokens / metrics["time/step_s"]
        if card := [metrics[key] for key in metrics if key.endswith("_card_gib")]:
            metrics["memory/peak_gib"] = max(card)  # of this step
        # A tracker cannot draw what is not finite; metrics.jsonl says null.
        Trainer.log(self, {key: value for key, value in metrics.items() if value is not None}, start_time)
        if self.control.should_evaluate:
            self._unwritten = metrics
        else:
            parts.log.write_step(step, metrics)
        self._log_completions(step)

    def _collected_metrics(self) -> dict[str, float]:
        """The metrics of the step's inputs; a further update on the same rollout repeats only the noise's."""
        metrics, updates = self._collected.metrics, self.parts.config.loss.num_iterations
        if (self.state.global_step - 1) % updates == 0:
            return {**metrics, "tokens_total": float(self.state.num_input_tokens_seen)}
        return {key: value for key, value in metrics.items() if key.startswith("noise/")}

    def _log_completions(self, step: int) -> None:
        wanted, found = self.parts.config.logging, self._collected
        if found.groups and wanted.completions_count and (step == 1 or step % wanted.completions_every == 0):
            rows = completion_rows(found.groups, found.advantages_P_G, self.parts.rewards)
            self.parts.log.write_completions(step, spread(rows, wanted.completions_count))

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """Validate between a step's metrics and its checkpoint, and before the first step of this process."""
        step, metrics = self.state.global_step, self._unwritten
        self.control.should_evaluate, self._unwritten = False, None
        found = {}
        try:
            found = self.validation.run(step) if metrics else self.validation.at_start(step)
        finally:  # the step has ended, whatever becomes of its validation
            if metrics:
                self.parts.log.write_step(step, metrics | found)
        if found:  # for the trackers
            self.callback_handler.on_log(self.args, self.state, self.control, found)
        if metrics:
            self.validation.decide(step, self.control)
        return found

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        policy = self.parts.policy
        packed = policy.shards.packed() if policy.shards else []
        check_replicas([*policy.replicas(), *packed], self.parts.parallel)
        self.save_now()

    def save_now(self) -> None:
        """Write a checkpoint of the policy and the optimizer as they are; it may be called outside of the loop."""
        self.parts.log.phase("saving")
        self.parts.clear_noise()
        policy, run_dir, step = self.parts.policy, self.parts.run_dir, self.state.global_step
        shards = policy.shards
        # Ranks with replicas have the same numbers; one that saves outside of the loop is alone.
        check_trained(policy.parameters(), step, run_dir, self.parts.parallel if shards is not None else ALONE)
        if not self.parts.parallel.first:
            if shards is not None:
                shards.serve(self._answers())
            return
        keep = self.parts.config.run.keep_checkpoints
        best = self.validation.best if self.validation else None
        write_checkpoint(run_dir, step, keep, self._write_state, best and best.step)
        settle_best(run_dir, best, self.parts.config.kind.has_adapter)
        if shards is not None:
            shards.end()

    def _answers(self) -> Answer:
        """What this rank has of a checkpoint: a master under its name, an optimizer's state under its number."""
        policy, states = self.parts.policy, self.optimizer.state_dict()["state"]
        return lambda key: policy.answer(key) if isinstance(key, str) else states.get(key)

    def _write_state(self, folder: Path) -> None:
        """Write all that a resumed run reads."""
        self.parts.policy.save(folder)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self.parts.save(folder, self.state.global_step)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if (shards := self.parts.policy.shards) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        whole = shards.whole_state(self.optimizer)
        torch.save(whole, Path(output_dir) / OPTIMIZER_NAME)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


# -- the recipe in TRL's words, and in transformers' where TRL inherits them

EPSILON = 1e-8  # of Adam


def trl_config(config: RunConfig, run_dir: Path) -> GRPOConfig:
    """One generation serves one optimizer step, or `num_iterations` of them.

    TRL sees a step as one micro-batch of all its rows, without gradient checkpointing: the trainer cuts it by tokens
    and says which layers recompute. A run on given rows generates nothing, and has no groups that a step would hold.
    """
    rollout, loss, optim, run = config.rollout, config.loss, config.optim, config.run
    on_gpu = torch.cuda.is_available()
    generations, size = (1, rollout.group_size) if config.kind.samples else (2, 2)  # of two rows at least, TRL wants
    return GRPOConfig(
        steps_per_generation=generations,
        num_generations=size,
        num_iterations=loss.num_iterations,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        loss_type=loss.type,
        importance_sampling_level=loss.level,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        delta=loss.delta,
        beta=loss.kl_coef,
        use_bias_correction_kl=loss.kl_unbiased,
        scale_rewards=loss.advantage_scale,
        mask_truncated_completions=loss.mask_truncated,
        entropy_coef=loss.entropy_coef,
        router_aux_loss_coef=0.0,  # it balances the experts by training routers, and these are frozen
        vllm_importance_sampling_mode=loss.correction.mode if loss.correction.mode != "off" else "token_truncate",
        output_dir=str(run_dir),
        max_steps=run.steps,
        seed=run.seed,
        per_device_train_batch_size=config.rows_per_step,
        gradient_accumulation_steps=1,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        adam_beta2=optim.beta2,
        adam_epsilon=EPSILON,
        max_grad_norm=optim.max_grad_norm,
        warmup_steps=optim.warmup_ratio,
        lr_scheduler_type=optim.schedule if optim.schedule != "constant" else "constant_with_warmup",
        optim=_optimizer_name(optim.name, on_gpu),
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="steps",
        save_steps=run.save_every,
        ignore_data_skip=True,  # the sampler starts at the resumed step itself
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run
        report_to="none",  # training/run_dir/trackers.py makes the callbacks
        project=os.environ.get("WANDB_PROJECT") or "qerl",
        run_name=run_dir.name,
        disable_tqdm=True,
        eval_on_start=config.validation.every is not None,  # the trainer knows whether that validation is due
        remove_unused_columns=False,
    )


def _optimizer_name(name: str, on_gpu: bool) -> str:
    has_8bit = on_gpu and importlib.util.find_spec("bitsandbytes") is not None
    if name == "adamw_8bit" and not has_8bit:
        raise EngineError(
            "optim.name is adamw_8bit, which needs a CUDA device and bitsandbytes (`pip install 'qerl[gpu]'`): "
            "write adamw, or auto to take it where it runs"
        )
    return "adamw_bnb_8bit" if name == "adamw_8bit" or (name == "auto" and has_8bit) else "adamw_torch"
