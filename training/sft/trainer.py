"""The trainer of given rows: each step takes the next ones, in an order that depends on the seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qerl.engine.update import deliver
from training.parts import TrainingParts
from training.rollout.groups import derive_seed
from training.rollout.prompts import StepPrompts
from training.run_trainer import RunTrainer
from training.sft.loss import LOSS_TYPE, sft_loss
from training.sft.rows import Row, Rows, batch_of
from training.step import Objective

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments

    from qerl.engine.loaded_base import LoadedBase
    from training.loss.batch import Batch
    from training.validation.validation import Validation


@dataclass(frozen=True, kw_only=True)
class SftParts(TrainingParts):
    """What a run on given conversations is made of."""

    base: LoadedBase
    rows: Rows


class SftTrainer(RunTrainer):
    """See the module docstring."""

    parts: SftParts

    def __init__(
        self,
        parts: SftParts,
        args: TrainingArguments,
        callbacks: list[TrainerCallback],
        start_step: int = 0,
        validation: Validation | None = None,
    ) -> None:
        """`start_step` is the optimizer step that a resumed run continues at."""
        self.parts, self._start_step, self.validation = parts, start_step, validation
        self._seen: dict[str, float] = {}  # of the present step
        super().__init__(
            model=parts.policy.model,
            args=args,
            processing_class=parts.tokenizer,
            callbacks=[*callbacks, *([validation] if validation else [])],
        )

    def get_train_dataloader(self) -> StepPrompts:
        config, rows = self.parts.config, self.parts.rows.trained
        return StepPrompts(rows, config.sft.rows_per_step, 1, config.run.steps, config.run.seed, self._start_step)

    def _prepare_inputs(self, rows: list[Row]) -> Batch:
        parts, step = self.parts, self.state.global_step
        # The dropout of a step follows from (seed, step, rank).
        torch.manual_seed(derive_seed(parts.config.run.seed, step, f"training/{parts.parallel.rank}"))
        sync_(parts)
        tokens = sum(len(row.ids) for row in rows)
        self.state.num_input_tokens_seen += tokens
        self._seen = {
            "rows/mean_tokens": tokens / len(rows),
            "rows/max_tokens": float(max(len(row.ids) for row in rows)),
            "rows/learned_share": sum(sum(row.learned) for row in rows) / tokens,
            "rows/epoch": (step + 1) * len(rows) / len(parts.rows.trained),
            "tokens_total": float(self.state.num_input_tokens_seen),
        }
        return batch_of(rows, parts.tokenizer.pad_token_id).to(parts.packed.device)

    def objective(self) -> Objective:
        return Objective(sft_loss, LOSS_TYPE)

    def step_metrics(self) -> dict[str, float]:
        return dict(self._seen)

    def speeds(self, step_s: float) -> dict[str, float]:
        return {"speed/tokens_per_s": self._seen["rows/mean_tokens"] * self.parts.config.sft.rows_per_step / step_s}


def sync_(parts: SftParts) -> None:
    """Pack whole weights into the base, where those are trained; an adapter acts on it as it is."""
    deliver(parts.policy.update(), parts.base)
    if (shards := parts.policy.shards) is not None:
        shards.send_packed_()
