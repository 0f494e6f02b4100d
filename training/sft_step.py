"""A run on given conversations: its parts, step, validation and loss. A step takes the next rows instead of a rollout.

The rows of a step follow from the seed alone. The loss is the mean negative log-likelihood of a step's learned tokens.
That is TRL's `SFTTrainer` with `assistant_only_loss`, whose `num_items_in_batch` are the labels of a whole step: every
token weighs the same, in whatever row it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qerl.base.philox import derive_seed
from qerl.checkpoint.resolve import ModelRef, describe
from qerl.engine.loaded_base import LoadedBase
from qerl.engine.options import EngineOptions
from qerl.engine.update import deliver
from training.parts import Given, Loaded, TrainingParts
from training.preflight.checks import read_given
from training.rollout.prompts import StepPrompts
from training.sft.rows import Row, Rows, batch_of
from training.step import Collected, Loss, Objective

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig
    from training.loss.batch import LossInputs, Metrics
    from training.run_dir.stop import Stop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GivenRows(Given):
    """What a run on given conversations is given: its prompts are the rows that it trains on."""

    rows: Rows

    @classmethod
    def read(cls, config: RunConfig, base: ModelRef, parallel: Parallel) -> GivenRows:
        """The rows of a recipe. Raises QerlError as `read_given`."""
        tokenizer, rows = read_given(config, base)
        return cls(tokenizer, rows.trained, parallel=parallel, rows=rows)

    def opened(self, config: RunConfig, served: ModelRef) -> LoadedBase:
        """The base; no engine is opened, since nothing is sampled."""
        options = EngineOptions(
            trust_remote_code=config.model.trust_remote_code,
            cap_gib=config.memory.cap_gib,
            start=served.start if config.adapter.start == "frozen" else None,
        )
        loaded = LoadedBase(served.base, served.format, options)
        logger.info("%s; %s", describe(served), loaded.kernel)
        return loaded

    def inputs(self, config: RunConfig) -> dict[str, str]:
        return self.rows.inputs()

    def parts(self, config: RunConfig, opened: Loaded, shared: Mapping[str, Any]) -> TrainingParts:
        return SftParts(base=opened.engine, rows=self.rows, **shared)


@dataclass(frozen=True, kw_only=True)
class SftParts(TrainingParts):
    """What a run on given conversations is made of."""

    base: LoadedBase
    rows: Rows

    @property
    def validates(self) -> bool:
        return bool(self.rows.held_out)

    def objective(self, rewarded: Loss) -> Objective:
        return Objective(sft_loss, "dapo")

    def steps(self, start_step: int) -> StepPrompts:
        config = self.config
        return StepPrompts(
            self.rows.trained, config.sft.rows_per_step, 1, config.run.steps, config.run.seed, start_step
        )

    def collect(self, rows: Sequence[Row], step: int) -> Collected:
        """The rows of one step, ready to train on."""
        # The dropout of a step follows from (seed, step, rank).
        torch.manual_seed(derive_seed(self.config.run.seed, step, f"training/{self.parallel.rank}"))
        self._sync_()
        tokens = sum(len(row.ids) for row in rows)
        metrics = {
            "rows/mean_tokens": tokens / len(rows),
            "rows/max_tokens": float(max(len(row.ids) for row in rows)),
            "rows/learned_share": sum(sum(row.learned) for row in rows) / tokens,
            "rows/epoch": (step + 1) * len(rows) / len(self.rows.trained),
        }
        return Collected(batch_of(rows, self.tokenizer.pad_token_id).to(self.packed.device), metrics, tokens)

    def _sync_(self) -> None:
        """Pack whole weights into the base, where those are trained; an adapter acts on it as it is."""
        deliver(self.policy.update(), self.base)
        if (shards := self.policy.shards) is not None:
            shards.send_packed_()

    def measure(self, step: int, stop: Stop) -> dict[str, float]:
        """The mean loss of all learned tokens of the rows that are held out, under validation/. The run stays as it is.

        Each rank reads its share of the rows. Empty if a signal came to a rank before its share was read.
        """
        started = time.perf_counter()
        self._sync_()
        shares = stop.of_all_ranks(self._share(stop))
        if not shares:
            return {}
        loss, tokens = (sum(part) for part in zip(*shares, strict=True))
        return {"validation/loss": loss / tokens, "time/validation_s": time.perf_counter() - started}

    def _share(self, stop: Stop) -> tuple[float, int] | None:
        """The summed loss of this rank's rows, and their learned tokens; None if a signal came meanwhile."""
        rows = self.rows.held_out
        own = sorted(rows[self.parallel.span(len(rows))], key=lambda row: -len(row.ids))
        size = self.config.sft.rows_per_step
        total, tokens = 0.0, 0
        for start in range(0, len(own), size):
            if stop.asked is not None:
                return None
            batch = batch_of(own[start : start + size], self.tokenizer.pad_token_id)
            logprobs_B_T = self.packed.score(*batch.tokens(), batch.loss_mask_B_T)
            total -= logprobs_B_T.double().sum().item()  # 0 where nothing is learned
            tokens += int(batch.loss_mask_B_T.sum())
        return total, tokens


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch, its share of the step's, and what it measured, as means over its tokens."""
    mask_B_T = inputs.rows.loss_mask_B_T
    tokens = mask_B_T.sum().clamp(min=1)
    summed = -(inputs.logprobs_B_T * mask_B_T).sum()
    entropies = (inputs.entropies_B_T.detach() * mask_B_T).sum()
    measured = {"nll": [(summed.detach() / tokens).item()], "entropy": [(entropies / tokens).item()]}
    return summed / inputs.step_tokens.clamp(min=1), measured
