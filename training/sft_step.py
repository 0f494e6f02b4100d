"""The step and the validation of a run on given conversations: the next rows instead of a rollout, and their loss.

The rows of a step follow from the seed alone. The loss is the mean negative log-likelihood of a step's learned tokens.
That is TRL's `SFTTrainer` with `assistant_only_loss`, whose `num_items_in_batch` are the labels of a whole step: every
token weighs the same, in whatever row it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qerl.base.philox import derive_seed
from qerl.engine.update import deliver
from training.rollout.prompts import StepPrompts
from training.sft.rows import Row, batch_of
from training.step import Collected

if TYPE_CHECKING:
    from training.loss.batch import LossInputs
    from training.loss.micro_batches import Metrics
    from training.parts import SftParts
    from training.run_dir.stop import Stop


def step_rows(parts: SftParts, start_step: int) -> StepPrompts:
    """The rows of each step, from `start_step` on."""
    config = parts.config
    return StepPrompts(parts.rows.trained, config.sft.rows_per_step, 1, config.run.steps, config.run.seed, start_step)


def collect_rows(parts: SftParts, rows: Sequence[Row], step: int) -> Collected:
    """The rows of one step, ready to train on."""
    # The dropout of a step follows from (seed, step, rank).
    torch.manual_seed(derive_seed(parts.config.run.seed, step, f"training/{parts.parallel.rank}"))
    sync_(parts)
    tokens = sum(len(row.ids) for row in rows)
    metrics = {
        "rows/mean_tokens": tokens / len(rows),
        "rows/max_tokens": float(max(len(row.ids) for row in rows)),
        "rows/learned_share": sum(sum(row.learned) for row in rows) / tokens,
        "rows/epoch": (step + 1) * len(rows) / len(parts.rows.trained),
    }
    return Collected(batch_of(rows, parts.tokenizer.pad_token_id).to(parts.packed.device), metrics, tokens)


def sync_(parts: SftParts) -> None:
    """Pack whole weights into the base, where those are trained; an adapter acts on it as it is."""
    deliver(parts.policy.update(), parts.base)
    if (shards := parts.policy.shards) is not None:
        shards.send_packed_()


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch, its share of the step's, and what it measured, as means over its tokens."""
    mask_B_T = inputs.rows.loss_mask_B_T
    tokens = mask_B_T.sum().clamp(min=1)
    summed = -(inputs.logprobs_B_T * mask_B_T).sum()
    entropies = (inputs.entropies_B_T.detach() * mask_B_T).sum()
    measured = {"nll": [(summed.detach() / tokens).item()], "entropy": [(entropies / tokens).item()]}
    return summed / inputs.step_tokens.clamp(min=1), measured


def measure_rows(parts: SftParts, step: int, stop: Stop) -> dict[str, float]:
    """The mean loss of all learned tokens of the rows that are held out, under validation/; the run stays as it was.

    Each rank reads its share of the rows. Empty if a signal came to a rank before its share was read.
    """
    started = time.perf_counter()
    sync_(parts)
    shares = stop.of_all_ranks(_share(parts, stop))
    if not shares:
        return {}
    loss, tokens = (sum(part) for part in zip(*shares, strict=True))
    return {"validation/loss": loss / tokens, "time/validation_s": time.perf_counter() - started}


def _share(parts: SftParts, stop: Stop) -> tuple[float, int] | None:
    """The summed loss of this rank's rows, and their learned tokens; None if a signal came meanwhile."""
    rows = parts.rows.held_out
    own = sorted(rows[parts.parallel.span(len(rows))], key=lambda row: -len(row.ids))
    size = parts.config.sft.rows_per_step
    total, tokens = 0.0, 0
    for start in range(0, len(own), size):
        if stop.asked is not None:
            return None
        batch = batch_of(own[start : start + size], parts.tokenizer.pad_token_id)
        logprobs_B_T = parts.packed.score(*batch.tokens(), batch.loss_mask_B_T)
        total -= logprobs_B_T.double().sum().item()  # 0 where nothing is learned
        tokens += int(batch.loss_mask_B_T.sum())
    return total, tokens
