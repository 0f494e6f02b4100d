"""What every trainer of ours adds to transformers' Trainer: our step, log, checkpoints and validation.

A kind of run says what its steps train on (`get_train_dataloader`, `_prepare_inputs`), what they minimize
(`objective`), what is looked at before an update (`before_update`) and what is logged besides (`step_metrics`).
`training/trainer.py` samples what it trains on, and `training/sft/trainer.py` is given it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from qerl.base.parallel import ALONE
from qerl.plan.trained import masters_dtype, trains_masters
from training.loss.gates import check_gradient, check_loss, check_trained
from training.policy.rounding import RandomlyRounded
from training.policy.shared_optimizer import clip_shared_, own_state, whole_state
from training.ranks import check_replicas
from training.run_dir.checkpoint import write_checkpoint
from training.run_dir.log import rename
from training.run_dir.result import settle_best
from training.run_dir.resume import set_rates_
from training.step import Objective, StepResult, backward

if TYPE_CHECKING:
    from training.loss.batch import Batch
    from training.loss.micro_batches import Metrics
    from training.parts import TrainingParts
    from training.policy.shards import Answer
    from training.validation.validation import Validation


class RunTrainer(Trainer):
    """See the module docstring. A subclass sets `parts`, and `validation` if the recipe asks for one."""

    parts: TrainingParts
    validation: Validation | None = None
    _result: StepResult | None = None
    _unwritten: Metrics | None = None  # of the step that is validated

    # -- what a kind of run says

    def objective(self) -> Objective:
        """What a step minimizes."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Stop the run if the update that comes next should not be made."""

    def step_metrics(self) -> dict[str, float]:
        """What is logged of a step beside its loss, its micro-batches and its times.

        time/rollout_and_grading_s are the seconds before its training.
        """
        return {}

    def speeds(self, step_s: float) -> dict[str, float]:
        """What is logged of the speed of a step that took so many seconds."""
        return {}

    def before_saving(self) -> None:
        """Take out of the model what does not belong into a checkpoint."""

    def write_besides(self, folder: Path) -> None:
        """Write into a checkpoint what this kind of run needs besides, to go on."""

    def read_besides(self, folder: Path) -> None:
        """Take over what `write_besides` wrote."""

    def after_logging(self, step: int) -> None:
        """Write what is kept of a step beside its metrics."""

    # -- loss and update

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """transformers' choice; around it, for masters in bfloat16, what rounds them at random."""
        optimizer, config = super().create_optimizer(model), self.parts.config
        if trains_masters(config) and masters_dtype(config.qat) == "bfloat16":
            self.optimizer = optimizer = RandomlyRounded(optimizer, config.run.seed)
        return optimizer

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a whole step. The loss that is returned has no graph any more."""
        self._result = backward(self.parts, inputs, self.objective(), self.accelerator.backward)
        return self._result.loss.requires_grad_()

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        times = self.parts.times
        times.begin_step()
        loss = super().training_step(model, inputs, num_items_in_batch)
        check_loss(loss, self.state.global_step + 1, self.parts.run_dir)
        self.before_update()
        times.begin("optimizer")  # until `log`, with the clipping of the gradient
        if not self.optimizer.state:
            # This update allocates it. In cached blocks of the micro-batches it would keep torch from freeing them.
            torch.cuda.empty_cache()
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if self.parts.policy.shards is None:
            return super()._clip_grad_norm(model)
        return clip_shared_(self.optimizer, self.args.max_grad_norm, self.parts.parallel)

    # -- logging and validation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One dict per step, in our names, for metrics.jsonl and every tracker."""
        if "loss" not in logs:  # the closing summary of transformers' Trainer repeats what the steps said
            return
        parts, step = self.parts, self.state.global_step
        parts.times.end()
        check_gradient(logs.get("grad_norm"), step, parts.run_dir)
        metrics = {**logs, **self.step_metrics(), **self._result.metrics}
        before_s = metrics.pop("time/rollout_and_grading_s", 0.0)
        counted_s = sum(metrics.get(key, 0.0) for key in ("time/rollout_s", "time/switch_s", "time/sync_s"))
        metrics = rename(metrics) | parts.times.metrics(counted_s)
        metrics["time/train_s"] = metrics["time/step_s"] - metrics["time/optimizer_s"] - before_s
        metrics |= self.speeds(metrics["time/step_s"])
        if card := [metrics[key] for key in metrics if key.endswith("_card_gib")]:
            metrics["memory/peak_gib"] = max(card)  # of this step
        # A tracker cannot draw what is not finite; metrics.jsonl says null.
        Trainer.log(self, {key: value for key, value in metrics.items() if value is not None}, start_time)
        if self.control.should_evaluate:
            self._unwritten = metrics
        else:
            parts.log.write_step(step, metrics)
        self.after_logging(step)

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """Validate between a step's metrics and its checkpoint, and before the first step of this process."""
        step, metrics = self.state.global_step, self._unwritten
        self.control.should_evaluate, self._unwritten = False, None
        if not metrics:
            found = self.validation.at_start(step)
        else:
            found = {}
            try:
                found = self.validation.run(step)
            finally:  # the step has ended, whatever becomes of its validation
                self.parts.log.write_step(step, metrics | found)
            self.validation.decide(step, self.control)
        return found

    # -- checkpoints

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        policy = self.parts.policy
        packed = policy.shards.packed() if policy.shards else []
        check_replicas([*policy.replicas(), *packed], self.parts.parallel)
        self.save_now()

    def save_now(self) -> None:
        """Write a checkpoint of the policy and the optimizer as they are; it may be called outside of the loop."""
        self.parts.log.phase("saving")
        self.before_saving()
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
        settle_best(run_dir, best)
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
        self.write_besides(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if (shards := self.parts.policy.shards) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        whole = whole_state(self.optimizer, lambda number: shards.ask(number, lambda _: None))
        torch.save(whole, Path(output_dir) / OPTIMIZER_NAME)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.parts.policy.shards is not None:
            read = partial(torch.load, map_location="cpu", weights_only=True)
            whole = read(Path(checkpoint) / OPTIMIZER_NAME, mmap=True)
            self.optimizer.load_state_dict(own_state(self.optimizer, whole))
            self.lr_scheduler.load_state_dict(read(Path(checkpoint) / SCHEDULER_NAME))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            set_rates_(self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self.parts.policy.load(Path(resume_from_checkpoint))
        self.read_besides(Path(resume_from_checkpoint))
