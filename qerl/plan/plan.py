"""What a run of a recipe takes on a card, known before anything is loaded: memory and seconds by phase. No torch.

Memory follows the code that allocates it: the engine's budget and KV cache (`engine_memory.py`), the micro-batches
(`micro_batch_plan.py`), and the adapter with its optimizer state. Seconds follow a model with few constants that were
fitted to the steps in benchmarks/ (docs/cost-model.md):

    decode step = layers * LAUNCH + weight bytes / bandwidth
                  + 2 weights * sequences / (DECODE_RATE * rate) + keys and values read / bandwidth
    training    = (4 + 2 * recomputed share) weights * tokens / (TRAIN_RATE * rate)

where the tokens of a prompt count once per micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl import formats
from qerl.engine.options import MAX_SEQUENCES
from qerl.errors import EngineError
from qerl.plan.cards import Card
from qerl.plan.engine_memory import (
    CONTEXT,
    GRAPH_RESERVE,
    GRAPHS,
    KERNELS,
    budget_bytes,
    kv_cache_bytes,
    least_bytes,
    outside_bytes,
    plan_memory,
    sampler_bytes,
    smaller_base,
)
from qerl.plan.kv_cache import fitting_8_bit_cache
from qerl.plan.micro_batch_plan import (
    GIB,
    MARGIN,
    Footprint,
    MicroBatchPlan,
    Shapes,
    Wishes,
    largest_micro_batch,
    plan_micro_batches,
)
from qerl.plan.sizes import ModelSizes
from qerl.plan.trained import BYTES, adapter_rank, trained_of

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig

ENGINE_WORK = int(1.2 * GIB)  # activations of a prefill of 8192 tokens and logits of a full batch
LAUNCH = 33e-6  # seconds that a decoder layer takes beside reading its weights
DECODE_RATE, TRAIN_RATE = 0.88, 0.74  # shares of the card's rate that are reached


@dataclass(frozen=True)
class Problem:
    """What does not fit, and what to change. It needs `needed` bytes of `available`; both are 0 if it is not memory."""

    text: str
    needed: float = 0
    available: float = 0

    def exceeds(self, share: float) -> bool:
        """Whether it is too large by more than `share`: the plan itself is not exact."""
        return self.needed > self.available * (1 + share)


@dataclass(frozen=True)
class Plan:
    """Memory in bytes and time in seconds; `found` is empty if everything fits."""

    card: Card
    sizes: ModelSizes
    limit: int
    memory: dict[str, dict[str, float]]  # phase -> what takes it -> bytes
    seconds: dict[str, float]  # phase -> seconds per step
    micro_batches: MicroBatchPlan | None
    cache_tokens: int
    context: int
    found: tuple[Problem, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem.text for problem in self.found)

    def peak(self, phase: str) -> float:
        return sum(self.memory[phase].values())


def plan(config: RunConfig, sizes: ModelSizes, card: Card) -> Plan:
    """Plan a run with the vllm engine. `problems` says what does not fit; the rest is planned nevertheless."""
    config = with_masters(config, sizes, card)
    room = _Room(int(card.memory_gib * GIB), *_weights_and_outside(config, sizes))
    limit, _ = room.limit_and_budget(config)
    context = config.data.max_prompt_tokens + config.longest_completion + 1
    common = {"weights": room.weights, **_trainer(config, sizes)}
    common |= {"context": CONTEXT, "kernels": KERNELS, "CUDA graphs": GRAPHS}
    common["sampler"] = sampler_bytes(MAX_SEQUENCES, sizes.vocabulary)
    problems: list[Problem] = []
    if sizes.positions is not None and context - 1 > sizes.positions:
        text = (
            f"a prompt of {config.data.max_prompt_tokens} and a completion of {config.longest_completion} tokens "
            f"are more than the model's {sizes.positions} positions: lower rollout.max_new_tokens"
        )
        problems.append(Problem(text))
    cache = _cache_bytes(config, sizes, room, context, problems)
    footprint = _footprint(config, sizes)
    micro_batches = _micro_batches(config, footprint, limit, sum(common.values()), problems)
    tokens = _largest(config, micro_batches)[1]
    least = footprint.needed(tokens, 0 if config.run.gradient_checkpointing is False else sizes.layers)
    memory = {
        "rollout": {**common, "KV cache": cache, "engine's work": ENGINE_WORK},
        "training": {**common, "micro-batch": micro_batches.needed(tokens) if micro_batches else least},
    }
    return Plan(
        card,
        sizes,
        limit,
        memory,
        _seconds(config, sizes, card, micro_batches),
        micro_batches,
        int(cache / sizes.kv_bytes(config.rollout.kv_cache_dtype)),
        context,
        tuple(problems),
    )


def with_masters(config: RunConfig, sizes: ModelSizes, card: Card) -> RunConfig:
    """The same with a dtype instead of `qat.masters: auto`: float32 if the card holds that, otherwise bfloat16."""
    if config.qat is None or config.qat.masters != "auto":
        return config
    wide, narrow = (
        config.model_copy(update={"qat": config.qat.model_copy(update={"masters": dtype})}) for dtype in BYTES
    )
    return narrow if any(problem.needed for problem in plan(wide, sizes, card).found) else wide


def trainer_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """What the trainer keeps on the card during a rollout."""
    return sum(_trainer(config, sizes).values())


def wishes_of(config: RunConfig) -> Wishes:
    """What a recipe asks of its micro-batches."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    return Wishes(config.run.micro_batch_tokens, config.run.gradient_checkpointing, longest, longest * rows)


def _trainer(config: RunConfig, sizes: ModelSizes) -> dict[str, int]:
    trained = trained_of(config, sizes)
    return {trained.name: trained.count * trained.kept_bytes, "optimizer": trained.count * trained.state_bytes}


@dataclass(frozen=True)
class _Room:
    """Bytes of the card, of the engine's weights with its adapter buffers, and of what lies outside the budget."""

    total: int
    weights: int
    outside: int

    def limit_and_budget(self, config: RunConfig) -> tuple[int, int]:
        return budget_bytes(self.total, config.rollout.memory, config.memory.cap_gib, self.outside)


def _weights_and_outside(config: RunConfig, sizes: ModelSizes) -> tuple[int, int]:
    weights = int(sizes.weights_bytes(config.model.format)) + sizes.engine_adapter_bytes(adapter_rank(config))
    return weights, outside_bytes(trainer_bytes(config, sizes), MAX_SEQUENCES, sizes.vocabulary)


def _cache_bytes(config: RunConfig, sizes: ModelSizes, room: _Room, context: int, problems: list[Problem]) -> int:
    """The engine's KV cache: what MAX_SEQUENCES full contexts need, or what its budget leaves."""
    limit, budget = room.limit_and_budget(config)
    wishes = config.rollout.memory, config.memory.cap_gib
    try:
        allowed = plan_memory(room.total, room.weights, *wishes, room.outside, _quantized(config))
    except EngineError as error:
        problems.append(Problem(str(error), max(least_bytes(room.weights), budget), min(limit, budget)))
        return 0
    kind = config.rollout.kv_cache_dtype
    per_token = sizes.kv_bytes(kind)
    wanted = kv_cache_bytes(allowed, room.weights, MAX_SEQUENCES * context, per_token)
    other = room.weights + GRAPH_RESERVE + ENGINE_WORK
    cache = wanted if wanted is not None else budget - other
    if cache < context * per_token:
        smaller = f"set rollout.kv_cache_dtype: {fitting_8_bit_cache(sizes)}, " if kind == "auto" else ""
        text = (
            f"one sequence of {context} tokens needs {context * per_token / GIB:.1f} GiB of KV cache and "
            f"{max(cache, 0) / GIB:.1f} GiB are left: lower rollout.max_new_tokens, "
            f"{smaller}or give it more memory"
        )
        problems.append(Problem(text, other + context * per_token, budget))
    elif (peak := other + cache + room.outside) > limit:
        text = (
            f"a rollout takes {peak / GIB:.1f} GiB, its budget and {room.outside / GIB:.1f} GiB outside it, and the "
            f"limit is {limit / GIB:.1f} GiB: {_lower_budget(config, room, limit)}"
        )
        problems.append(Problem(text, peak, limit))
    return max(cache, 0)


def _quantized(config: RunConfig) -> bool:
    return formats.get(config.model.format).quantized


def _lower_budget(config: RunConfig, room: _Room, limit: int) -> str:
    """Advice: the largest rollout.memory that fits, in the unit that was given, or more memory for the weights."""
    fitting, memory = limit - room.outside, config.rollout.memory
    if memory is None or fitting < least_bytes(room.weights):
        return f"give it more memory (card, memory.cap_gib), or take {smaller_base(_quantized(config))}"
    if memory > 1:
        return f"lower rollout.memory to {math.floor(10 * fitting / GIB) / 10:g}"
    return f"lower rollout.memory to {math.floor(100 * fitting / limit) / 100:g}"


def _footprint(config: RunConfig, sizes: ModelSizes) -> Footprint:
    trained = trained_of(config, sizes)
    return Shapes(
        hidden=sizes.hidden,
        intermediate=sizes.projections["gate_proj"][0],
        query=sizes.projections["q_proj"][0],
        key_value=sizes.projections["k_proj"][0],
        layers=sizes.layers,
        vocabulary=sizes.vocabulary,
        rank=adapter_rank(config),
        trained=trained.count,
        trained_bytes=trained.gradient_bytes,
        head_norms=sizes.head_norms,
    ).footprint(config.loss.entropy_coef > 0)


def _micro_batches(
    config: RunConfig, footprint: Footprint, limit: int, common: float, problems: list[Problem]
) -> MicroBatchPlan | None:
    """The plan of training beside `common` bytes, which are taken before it begins; None if nothing fits."""
    wishes = wishes_of(config)
    try:
        return plan_micro_batches(footprint, wishes, int(max(limit - common, 0)))
    except EngineError as error:
        recomputed = 0 if wishes.recompute is False else footprint.layers
        least = footprint.needed(max(wishes.tokens or 0, wishes.longest), recomputed)
        problems.append(Problem(str(error), common + least / (1 - MARGIN), limit))
        return None


def _largest(config: RunConfig, micro_batches: MicroBatchPlan | None) -> tuple[int, int]:
    """(rows, tokens) of the largest micro-batch of a step in which every completion has full length."""
    budget = 0 if micro_batches is None else micro_batches.micro_batch_tokens
    rollout = config.rollout
    groups = (rollout.prompts_per_step, rollout.group_size)
    return largest_micro_batch(budget, *groups, config.data.max_prompt_tokens, rollout.max_new_tokens)


def decode_seconds(sizes: ModelSizes, card: Card, format: str, sequences: int, cached: float) -> float:
    """Seconds of a decode step of `sequences`, which reads `cached` bytes of keys and values."""
    read = (sizes.weights_bytes(format) + cached) / (card.gb_per_s * 1e9)
    computed = 2 * (sizes.body + sizes.head) * sequences / (DECODE_RATE * card.tflops * 1e12)
    return sizes.layers * LAUNCH + read + computed


def _seconds(
    config: RunConfig, sizes: ModelSizes, card: Card, micro_batches: MicroBatchPlan | None
) -> dict[str, float]:
    """Seconds by phase of a step in which every completion has full length."""
    rollout = config.rollout
    sequences = rollout.prompts_per_step * rollout.group_size
    prompt, new = config.data.max_prompt_tokens, rollout.max_new_tokens
    rate, at_once = card.tflops * 1e12, min(sequences, MAX_SEQUENCES)
    cached = at_once * (prompt + new / 2) * sizes.kv_bytes(config.rollout.kv_cache_dtype)
    step = decode_seconds(sizes, card, config.model.format, at_once, cached)
    prefill = 2 * sizes.body * prompt * rollout.prompts_per_step / (TRAIN_RATE * rate)
    rows_at_once, tokens_at_once = _largest(config, micro_batches)
    recomputed = micro_batches.recomputed(tokens_at_once) / sizes.layers if micro_batches else 0.0
    micro_batches_per_group = -(-rollout.group_size // rows_at_once)
    prompts = rollout.prompts_per_step * micro_batches_per_group  # each micro-batch computes a prompt once
    tokens = prompts * prompt + sequences * new
    flops = (4 + 2 * recomputed) * sizes.body * tokens + 4 * sizes.head * sequences * new
    passes = config.loss.num_iterations
    return {
        "rollout": -(-sequences // MAX_SEQUENCES) * new * step + prefill,
        "training": passes * flops / (TRAIN_RATE * rate),
    }
