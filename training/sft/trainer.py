"""The trainer of given rows: each step takes the next ones, in an order that depends on the seed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qerl.engine.update import deliver
from training.rollout.prompts import StepPrompts
from training.rollout.seeds import derive_seed
from training.run_trainer import RunTrainer
from training.sft.loss import LOSS_TYPE, sft_loss
from training.sft.rows import Row, batch_of
from training.step import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import TrainerCallback, TrainingArguments

    from qerl.engine.loaded_base import LoadedBase
    from training.loss.batch import Batch
    from training.parts import TrainingParts
    from training.validation.validation import Validation


class SftTrainer(RunTrainer):
    """See the module docstring."""

    def __init__(
        self,
        parts: TrainingParts,
        base: LoadedBase,
        rows: Sequence[Row],
        args: TrainingArguments,
        callbacks: list[TrainerCallback],
        start_step: int = 0,
        validation: Validation | None = None,
    ) -> None:
        """`start_step` is the optimizer step that a resumed run continues at."""
        self.parts, self._base, self._rows, self._start_step, self.validation = (
            parts,
            base,
            rows,
            start_step,
            validation,
        )
        self._seen: dict[str, float] = {}  # of the present step
        super().__init__(
            model=parts.policy.model,
            args=args,
            processing_class=parts.tokenizer,
            callbacks=[*callbacks, *([validation] if validation else [])],
        )

    def get_train_dataloader(self) -> StepPrompts:
        run = self.parts.config.run
        return StepPrompts(self._rows, self.parts.config.sft.rows_per_step, 1, run.steps, run.seed, self._start_step)

    def _prepare_inputs(self, rows: list[Row]) -> Batch:
        parts, step = self.parts, self.state.global_step
        # The dropout of a step follows from (seed, step, rank).
        torch.manual_seed(derive_seed(parts.config.run.seed, step, f"training/{parts.parallel.rank}"))
        sync_(parts, self._base)
        tokens = sum(len(row.ids) for row in rows)
        self.state.num_input_tokens_seen += tokens
        self._seen = {
            "rows/mean_tokens": tokens / len(rows),
            "rows/max_tokens": float(max(len(row.ids) for row in rows)),
            "rows/learned_share": sum(sum(row.learned) for row in rows) / tokens,
            "rows/epoch": (step + 1) * len(rows) / len(self._rows),
            "tokens_total": float(self.state.num_input_tokens_seen),
        }
        return batch_of(rows, parts.tokenizer.pad_token_id).to(parts.packed.device)

    def objective(self) -> Objective:
        return Objective(sft_loss, LOSS_TYPE)

    def step_metrics(self) -> dict[str, float]:
        return dict(self._seen)

    def speeds(self, step_s: float) -> dict[str, float]:
        return {"speed/tokens_per_s": self._seen["rows/mean_tokens"] * self.parts.config.sft.rows_per_step / step_s}


def sync_(parts: TrainingParts, base: LoadedBase) -> None:
    """Pack whole weights into the base, where those are trained; an adapter acts on it as it is."""
    deliver(parts.policy.update(), base)
    if (shards := parts.policy.shards) is not None:
        shards.send_packed_()
