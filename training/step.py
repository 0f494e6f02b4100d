"""One step of training, from prompts to the gradient. Read this file first.

    prompts ─sample─> groups ─grade─> rewards ─advantages─> batch ─micro-batches─> logprobs ─loss─> backward
       ^                                                                                               │
       └──────────────── sync <─────────────── optimizer (transformers' Trainer) <─────────────────────┘

The trainer (training/trainer.py) calls `collect` where TRL asks for a step's inputs and `backward` where it asks for
their loss, several times on one batch if `loss.num_iterations` says so. A distillation has another loss, for which a
teacher reads each packed row first; given conversations are collected by training/sft_step.py. Of several ranks
(training/ranks.py) each samples its share of the prompts and trains on its share of the micro-batches.

Axis suffixes: P prompts, G completions per prompt, B = P * G rows, L prompt tokens, T completion tokens, F rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from qerl.base.philox import derive_seed, permutation
from training.loss.batch import (
    Batch,
    LossInputs,
    Metrics,
    MicroBatch,
    experts_of_rows,
    merge_metrics,
    padded_left,
    padded_right,
    row_metrics,
    split,
)
from training.loss.correction import Mismatch, importance_weights
from training.loss.groups import group_advantages, group_metrics, length_metrics, logged_means, sampled_metrics
from training.policy.train_memory import make_gradients_, training_memory
from training.ranks import dealt, largest, merged_rollouts, sum_gradients_
from training.rewards.grading import Graded, merged_grades, reward_metrics, source_metrics
from training.rollout.sampler import Rollout, rollout_metrics

if TYPE_CHECKING:
    from qerl.config.schema import CorrectionConfig
    from qerl.model.experts import Replay
    from qerl.model.packing import PackedRow
    from training.loss.groups import GradedGroup, Prompt
    from training.parts import Parts, TrainingParts

COMPARED_EVERY = 10  # steps: it costs a forward pass of the first micro-batch, on the rank that has it

Loss = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]  # a micro-batch's loss () and its metrics


class Objective(NamedTuple):
    """What a step minimizes: the loss of a micro-batch, and how the micro-batches share the step's loss."""

    loss: Loss
    loss_type: str  # as `micro_batches` knows it
    advantage_only: bool = False  # rows without an advantage have no gradient


@dataclass(frozen=True)
class Collected:
    """The inputs of one step, or of all updates on one rollout."""

    batch: Batch
    metrics: dict[str, float]
    tokens: int  # of all completions, and of their prompts, each of which counts for every completion
    groups: Sequence[GradedGroup] = ()  # in the order in which they were sampled; the batch is shuffled
    advantages_P_G: torch.Tensor | None = None


def collect(parts: Parts, prompts: Sequence[Prompt], step: int) -> Collected:
    """Sample, grade and score the prompts of one rollout with the policy as it is now."""
    config, started = parts.config, time.perf_counter()
    # Everything random until the next rollout follows from (seed, step). The dropout of each rank is its own, while
    # the order of rows has to be the same on all, whatever each has drawn until then.
    torch.manual_seed(derive_seed(config.run.seed, step, f"training/{parts.parallel.rank}"))
    sync_s = parts.sampler.sync(step)
    groups, metrics = sample_and_grade(parts, prompts, step)
    total_P_G = torch.stack([graded.total_G for graded in groups])
    advantages_P_G, equal_share = group_advantages(total_P_G, config.loss.advantage_scale)
    batch = padded_batch(groups, advantages_P_G, parts.tokenizer.pad_token_id, config.loss.mask_truncated)
    batch = score(parts, batch)
    batch = batch.rows(permutation(len(batch), config.run.seed, step, "training"))
    batch = replace(batch, compares_replay=step % COMPARED_EVERY == 0)
    metrics |= {
        **length_metrics(groups),
        **reward_metrics(groups, parts.rewards.names),
        **source_metrics(groups, parts.rewards),
        **({"groups/zero_variance_share": equal_share} if parts.teacher is None else {}),
        "time/sync_s": sync_s,
        "time/rollout_and_grading_s": time.perf_counter() - started,  # with the scoring of old logprobs
    }
    sampled = [(graded.group, sample) for graded in groups for sample in graded.group.samples]
    prompt_tokens = sum(len(group.prompt_of(sample)) for group, sample in sampled)
    tokens = prompt_tokens + sum(graded.group.tokens for graded in groups)
    return Collected(batch.to(parts.packed.device), metrics, tokens, groups, advantages_P_G)


def sample_and_grade(parts: Parts, prompts: Sequence[Prompt], step: int) -> tuple[list[GradedGroup], dict[str, float]]:
    """The groups to train on and the metrics of their rollouts; with dynamic sampling there may be several rollouts.

    Each rank samples and grades its share of the prompts, and all get all groups.
    """
    dynamic = parts.config.rollout.dynamic_sampling
    rollouts: list[Rollout] = []
    graded: list[Graded] = []  # of each rollout

    def draw(rows: Sequence[int]) -> list[GradedGroup]:
        own = parts.parallel.span(len(rows))
        share = [parts.prompts[row] for row in rows[own]]
        rollout = sample(parts, share, step, attempt=len(rollouts), first=own.start)
        of_ranks = parts.parallel.gather((rollout, grade(parts, rollout, step)))
        if parts.carry_over is not None:
            parts.carry_over.keep(step, [sampled.kept for sampled, _ in of_ranks])
        rollouts.append(merged_rollouts([sampled for sampled, _ in of_ranks]))
        graded.append(merged_grades([grades for _, grades in of_ranks]))
        return list(graded[-1].groups)

    rows = [prompt.row for prompt in prompts]
    if not dynamic.enabled:
        kept = sampled = draw(rows)
        metrics = {} if parts.carry_over is None else parts.carry_over.metrics(step, kept)
    else:
        from training.rollout.dynamic_sampling import MAX_EXTRA_ROLLOUTS, fill_batch

        order = permutation(len(parts.prompts), parts.config.run.seed, step, "extra prompts").tolist()
        if parts.curriculum is not None:
            order = parts.curriculum.preferred(order)
        chosen = fill_batch(draw, rows, order, MAX_EXTRA_ROLLOUTS, lambda row: parts.prompts[row].source)
        kept, sampled = chosen.kept, chosen.sampled
        metrics = {**chosen.metrics(), **sampled_metrics(sampled, parts.rewards.names)}
    metrics |= logged_means(merged_grades(graded).logged) | group_metrics(sampled, parts.rewards.names)
    return kept, {**rollout_metrics(rollouts), **metrics, **observed(parts, sampled)}


def observed(parts: Parts, groups: Sequence[GradedGroup]) -> dict[str, float]:
    """Let the curriculum note what was sampled; its metrics, none without one."""
    if parts.curriculum is None:
        return {}
    parts.curriculum.observe(groups)
    return parts.curriculum.metrics()


def sample(parts: Parts, prompts: Sequence[Prompt], step: int, attempt: int, first: int) -> Rollout:
    """One rollout: a group of completions for each prompt, by the engine with the step's noise in its norms.

    `first` is the place of the first prompt in the rollout of all ranks. Where completions are carried over, those in
    progress go on instead, and which prompts begin follows from them.
    """
    parts.log.phase("rollout")
    if parts.carry_over is not None:
        return parts.sampler.go_on(parts.carry_over.pool(step, parts.sampler.sampling), step)
    return parts.sampler.sample(prompts, step, attempt, first)


def grade(parts: Parts, rollout: Rollout, step: int) -> Graded:
    """The rewards of every completion."""
    parts.log.phase("grading")
    with parts.times.phase("reward"):
        return parts.grader.grade(rollout.groups, step + 1, steps_done=step)


def padded_batch(
    groups: Sequence[GradedGroup], advantages_P_G: torch.Tensor, pad_id: int, mask_truncated: bool
) -> Batch:
    """The groups' completions as rows, group after group, on the CPU."""
    prompts = [torch.tensor(g.group.prompt_of(sample)) for g in groups for sample in g.group.samples]
    samples = [sample for g in groups for sample in g.group.samples]
    completions = [torch.tensor(sample.token_ids) for sample in samples]
    kept_B = torch.tensor([not (mask_truncated and sample.truncated) for sample in samples])
    completion_mask_B_T = padded_right([torch.ones_like(ids) for ids in completions], 0) * kept_B[:, None]
    loss_mask_B_T = padded_right([torch.tensor(sample.loss_mask, dtype=torch.long) for sample in samples], 0)
    return Batch(
        prompt_ids_B_L=padded_left(prompts, pad_id),
        prompt_mask_B_L=padded_left([torch.ones_like(ids) for ids in prompts], 0),
        completion_ids_B_T=padded_right(completions, pad_id),
        completion_mask_B_T=completion_mask_B_T,
        loss_mask_B_T=completion_mask_B_T * loss_mask_B_T,
        advantages_B=advantages_P_G.flatten(),
        sampling_logprobs_B_T=padded_right([torch.tensor(sample.logprobs) for sample in samples], 0.0),
        experts=experts_of_rows(samples, [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]),
    )


def score(parts: Parts, batch: Batch) -> Batch:
    """The batch with the logprobs that its loss compares with: before the first update, and of the reference."""
    loss, old, reference = parts.config.loss, None, None
    tokens = (*batch.tokens(), batch.loss_mask_B_T, *([batch.experts] if batch.experts else []))
    with parts.times.phase("forward"):
        if loss.num_iterations > 1:  # with one update per rollout they equal the current ones
            old = _score(parts, tokens)
        if loss.kl_coef:
            with parts.policy.reference():
                reference = _score(parts, tokens)
    return replace(batch, old_logprobs_B_T=old, reference_logprobs_B_T=reference)


def _score(parts: Parts, tokens: tuple[Sequence, ...]) -> torch.Tensor:
    """Logprobs (B, T) of all rows, of which each rank computes its share."""
    own = parts.parallel.span(len(tokens[0]))
    scored = parts.packed.score(*(each[own] for each in tokens))
    if parts.parallel.size == 1:
        return scored
    return torch.cat([part.to(scored.device) for part in parts.parallel.gather(scored.cpu())])


def backward(
    parts: TrainingParts, batch: Batch, objective: Objective, differentiate: Callable[[torch.Tensor], None]
) -> StepResult:
    """Add the gradient of a whole step to the policy's parameters: each rank's micro-batches, then one sum."""
    parts.log.phase("training")
    config, parallel = parts.config.loss, parts.parallel
    queued: list[Queued] = []
    loss, loss_type, advantage_only = objective
    states = parts.packed.layout.prompts_first
    micro_batches = split(batch, parts.plan.micro_batch_tokens, loss_type, advantage_only, parallel.size, states)
    step_tokens = batch.loss_mask_B_T.sum()
    with parts.packed.training(), training_memory(parts.plan) as memory:
        make_gradients_(parts.policy.parameters())
        of_ranks = dealt([micro_batch.cost for micro_batch in micro_batches], parallel.size)
        for index in of_ranks[parallel.rank]:
            micro_batch = micro_batches[index]
            row = micro_batch.packed(parts.packed.layout)  # on the CPU, while the GPU is busy with the one before
            taught = teach(parts, row)
            with parts.times.phase("forward"):
                inputs = loss_inputs(parts, micro_batch, row, step_tokens, taught)
                value, metrics = loss(inputs)
                value = value * micro_batch.loss_share
            with parts.times.phase("backward"):  # layers that recompute their activations do it here
                differentiate(value)
            other = unreplayed(parts, micro_batch, row) if batch.compares_replay and index == 0 else None
            queued.append(Queued(index, value.detach(), metrics, old_logprobs(inputs), row.replay, other))
        if (shards := parts.policy.shards) is not None:  # which are summed in each backward pass
            for _ in range(max(map(len, of_ranks)) - len(of_ranks[parallel.rank])):
                shards.add_nothing_()
    if parallel.size > 1:
        with parts.times.phase("reduce"):
            sum_gradients_(parts.policy.replicas(), parallel)
    planned = {"memory/train_planned_gib": parts.packed.planned / 2**30} if parts.packed.planned else {}
    # Counting waits for the GPU, so it comes only now.
    done = [done_of(micro_batches[each.index], config.correction, each) for each in queued]
    return step_result(parts, batch, micro_batches, parallel.gather((done, memory | planned)))


def teach(parts: TrainingParts, row: PackedRow) -> torch.Tensor | None:
    """The teacher's hidden states of a packed row, before the policy's layers keep anything; None without a teacher."""
    if parts.teacher is None:
        return None
    with parts.times.phase("teacher"):
        return parts.teacher.hidden(row)


def loss_inputs(
    parts: TrainingParts,
    micro_batch: MicroBatch,
    row: PackedRow,
    step_tokens: torch.Tensor,
    taught: torch.Tensor | None = None,
) -> LossInputs:
    """The forward pass of one micro-batch, and the weights that correct for the sampler being another policy."""
    config, rows = parts.config.loss, micro_batch.rows
    if taught is not None:
        found = parts.packed.divergences(row, rows.loss_mask_B_T.shape, parts.teacher, taught)
        return LossInputs(rows, found.logprobs, found.entropies, None, step_tokens, 0.0, found)
    logprobs, entropies = parts.packed.logprobs(row, rows.loss_mask_B_T.shape)
    # The loss is multiplied by `loss_share`; the entropy bonus in it is a mean over tokens, whatever the loss is.
    entropy_coef = config.entropy_coef * micro_batch.token_share / micro_batch.loss_share
    inputs = LossInputs(rows, logprobs, entropies, None, step_tokens, entropy_coef)
    old, sampling = old_logprobs(inputs), rows.sampling_logprobs_B_T
    if config.correction.mode == "off" or sampling is None:
        return inputs
    return replace(inputs, weights=importance_weights(old, sampling, rows.loss_mask_B_T, config.correction))


def old_logprobs(inputs: LossInputs) -> torch.Tensor:
    """(B, T) of the policy before the first update on this rollout."""
    old = inputs.rows.old_logprobs_B_T
    return inputs.logprobs_B_T.detach() if old is None else old


def unreplayed(parts: TrainingParts, micro_batch: MicroBatch, row: PackedRow) -> torch.Tensor | None:
    """Logprobs (B, T) of a micro-batch with the experts that the trainer itself would choose, before the first update.

    None if nobody recorded any, and where an update may have been made on these rows.
    """
    if row.replay is None or micro_batch.rows.old_logprobs_B_T is not None:
        return None
    with torch.no_grad(), parts.times.phase("forward"):
        return parts.packed.logprobs(replace(row, replay=None), micro_batch.rows.loss_mask_B_T.shape)[0]


# -- what a step measured: of each micro-batch while the GPU computes, then of all of them on every rank


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
        metrics["completions/trained_share"] = sum(len(each.rows) for each in micro_batches if each.trains) / len(batch)
    return StepResult(
        total,
        {**metrics, **memory, **unreplayed_metrics([(each.mismatch, each.unreplayed) for each in in_order])},
        mismatch,
    )


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
