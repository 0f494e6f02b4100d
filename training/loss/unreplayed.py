"""How far the sampler would be from the policy if the trainer chose the experts itself, in a few steps of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from training.loss.correction import Mismatch

if TYPE_CHECKING:
    from training.loss.micro_batches import MicroBatch
    from training.parts import TrainingParts
    from training.policy.packing import PackedRow

COMPARED_EVERY = 10  # steps: it costs a forward pass of the first micro-batch, on the rank that has it


def unreplayed(parts: TrainingParts, micro_batch: MicroBatch, row: PackedRow) -> torch.Tensor | None:
    """Logprobs (B, T) of a micro-batch with the experts that the trainer itself would choose, before the first update.

    None if nobody recorded any, and where an update may have been made on these rows.
    """
    if row.replay is None or micro_batch.rows.old_logprobs_B_T is not None:
        return None
    with torch.no_grad(), parts.times.phase("forward"):
        return parts.packed.logprobs(replace(row, replay=None), micro_batch.rows.loss_mask_B_T.shape)[0]


def unreplayed_metrics(pairs: Iterable[tuple[Mismatch, Mismatch | None]]) -> dict[str, float]:
    """The mean mismatch with and without a replay of the micro-batches for which both are given."""
    without, replayed = Mismatch(), Mismatch()
    for own, other in pairs:
        if other is not None:
            replayed.merge(own)
            without.merge(other)
    if not without.tokens:
        return {}
    return {"mismatch/kl_without_replay": without.mean_kl, "mismatch/kl_with_replay": replayed.mean_kl}
