"""What the ranks of a run share. Everything else each of them does as if it were alone.

Every rank has an engine, a trainer and a replica of the policy on its own card, and control is replicated: all of them
see the same groups, advantages, metrics and decisions. Three things are distributed:

    rollout        whole groups are dealt to the ranks, graded where they were sampled, and gathered
    micro-batches  planned for the whole batch, then dealt by cost
    gradient       one sum over the ranks, before clipping

The sum has the same bits on every rank, so the replicas stay equal without being sent. Whole weights are too
large to be replicated: `training/policy/shards.py`. One process does the same with nothing to share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import ParallelError
from training.rollout.sampler import Rollout

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel

BUCKET_BYTES = 2**28  # gradients that are summed at once


def merged_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """One rollout from the ranks' rollouts, which took as long as the slowest; `kept` is the first one's."""
    first = parts[0]
    return Rollout(
        groups=[group for part in parts for group in part.groups],
        seconds=max(part.seconds for part in parts),
        switch_s=max(part.switch_s for part in parts),
        noise=first.noise,
        memory=largest([part.memory for part in parts]),
        kept=first.kept,
        drawn_tokens=None if first.kept is None else sum(part.drawn_tokens for part in parts),
    )


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: max(part[name] for part in parts if name in part) for name in names}


def dealt(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the indices of what it takes, ascending: the costliest first, each to the rank with the least."""
    taken: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = loads.index(min(loads))
        taken[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(indices) for indices in taken]


def sum_gradients_(parameters: Iterable[torch.nn.Parameter], parallel: Parallel) -> None:
    """Replace each gradient by the sum over the ranks. Every parameter needs one, also where a rank had no work."""
    if parallel.size == 1:
        return
    for bucket in _buckets([parameter.grad for parameter in parameters]):
        if len(bucket) == 1:
            parallel.sum_(bucket[0])
            continue
        flat = parallel.sum_(torch.cat([gradient.flatten() for gradient in bucket]))
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def check_replicas(tensors: Iterable[torch.Tensor], parallel: Parallel) -> None:
    """Raise ParallelError unless the tensors have the same bits on all ranks."""
    if parallel.size == 1:
        return
    kinds = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    bits = [tensor.detach().view(kinds[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    sums = parallel.gather(torch.stack(bits).tolist())
    if others := [rank for rank, other in enumerate(sums) if other != sums[0]]:
        raise ParallelError(
            f"the weights of rank {others[0]} are not those of rank 0, although each step sums their gradients to the "
            "same bits: check the cards (`nvidia-smi -q -d ECC`), and resume from the last checkpoint"
        )


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The gradients in their order, as many of one dtype together as BUCKET_BYTES hold."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        used = sum(each.nbytes for each in bucket)
        if bucket and (used + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
