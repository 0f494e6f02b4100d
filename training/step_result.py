"""What one step of training measured: of each micro-batch while the GPU computes, then of all of them on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.loss.batch import Batch
from training.loss.correction import Mismatch
from training.loss.micro_batches import Metrics, MicroBatch, merge_metrics, row_metrics
from training.loss.unreplayed import unreplayed_metrics
from training.ranks import largest

if TYPE_CHECKING:
    from qerl.config.schema import CorrectionConfig
    from qerl.model.routing import Replay
    from training.parts import TrainingParts


@dataclass(frozen=True)
class StepResult:
    """The loss of a step (a number without a graph), its metrics, and how far the sampler was from the policy."""

    loss: torch.Tensor
    metrics: dict[str, float]
    mismatch: Mismatch


class Queued(NamedTuple):
    """What the GPU was asked to compute of one micro-batch; `index` is its place in the step."""

    index: int
    loss: torch.Tensor
    metrics: Metrics
    old: torch.Tensor  # logprobs before the first update
    replay: Replay | None = None
    unreplayed: torch.Tensor | None = None  # logprobs with experts of the trainer's choice


@dataclass(frozen=True)
class Done:
    """What came out, in numbers that the ranks can send each other."""

    index: int
    loss: float
    metrics: Metrics
    mismatch: Mismatch
    unreplayed: Mismatch | None = None


def done_of(micro_batch: MicroBatch, config: CorrectionConfig, queued: Queued) -> Done:
    """`queued` in numbers, which waits for the device."""
    rows, mismatch = micro_batch.rows, Mismatch()
    if rows.sampling_logprobs_B_T is not None:
        mismatch.add(queued.old, rows.sampling_logprobs_B_T, rows.loss_mask_B_T, config)
    if queued.replay is not None:
        mismatch.add_replay(queued.replay)
    other = None
    if queued.unreplayed is not None:
        other = Mismatch()
        other.add(queued.unreplayed, rows.sampling_logprobs_B_T, rows.loss_mask_B_T, config)
    return Done(queued.index, queued.loss.item(), queued.metrics, mismatch, other)


def step_result(
    parts: TrainingParts,
    batch: Batch,
    micro_batches: Sequence[MicroBatch],
    of_ranks: Sequence[tuple[list[Done], dict[str, float]]],
) -> StepResult:
    """The same on every rank: what was measured is counted in the order of the micro-batches."""
    config, total, mismatch = parts.config.loss, torch.zeros((), device=parts.packed.device), Mismatch()
    in_order = sorted((each for done, _ in of_ranks for each in done), key=lambda each: each.index)
    for each in in_order:
        total += each.loss
        mismatch.merge(each.mismatch)
    of_losses = [(micro_batches[each.index], each.metrics) for each in in_order]
    metrics = merge_metrics(of_losses, row_metrics(config.type, config.level))
    memory = largest([measured for _, measured in of_ranks])
    if batch.sampling_logprobs_B_T is not None:
        metrics["completions/trained_share"] = sum(len(each.rows) for each in micro_batches) / len(batch)
    return StepResult(
        total,
        {**metrics, **memory, **unreplayed_metrics([(each.mismatch, each.unreplayed) for each in in_order])},
        mismatch,
    )
