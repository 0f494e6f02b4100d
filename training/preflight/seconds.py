"""Seconds of a step on a card. No torch. The model has few constants, fitted to the steps in benchmarks/.

docs/lab/cost-model.md compares it with the measurements:

    decode step = layers * LAUNCH + weight bytes / bandwidth
                  + 2 weights * sequences / (DECODE_RATE * rate) + keys and values read / bandwidth
    training    = (4 + 2 * recomputed share) weights * tokens / (TRAIN_RATE * rate)
    teacher     = 2 of its weights * tokens / (TRAIN_RATE * rate)

where the tokens of a prompt count once per micro-batch. For weights that are trained themselves 2 weights * tokens /
rate come on top: the products of their gradients are large and stand alone, and reach the whole rate. Of products that
`train.fp8_recipe` rounds, ROUNDED_SHARE is counted. Rounding activations to 4 bits adds to each forward pass what
qerl/plan/sizes.py says.

In a mixture of experts the weights of flops are those that a token is multiplied by, and products over experts have
rates of their own (EXPERT_RATES). A decode step reads the experts that its sequences choose, and takes EXPERT_LAUNCH
for each layer of experts. Training decodes all of them in each direction of every micro-batch.

A layer with linear attention takes LINEAR_S of each micro-batch on top, in which the host calls its kernels, or as long
as the card needs for its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl import formats
from qerl.model.costs import BEGUN, LINEAR_S
from qerl.plan.engine_memory import MAX_SEQUENCES, Card
from qerl.plan.micro_batch_plan import MicroBatchPlan, busy_tokens, largest_micro_batch
from qerl.plan.sizes import ModelSizes, rounding_seconds, rounds_to_four_bits, teacher_flops
from qerl.plan.trained import trainee

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig

LAUNCH = 31e-6  # seconds that a decoder layer takes beside reading its weights
DECODE_RATE, TRAIN_RATE = 0.91, 0.74  # shares of the card's rate that are reached
ROUNDED_SHARE = 0.7  # of the seconds of a product in 16 bits, that it takes in FP8 with the rounding of its sides
EXPERT_LAUNCH = 42e-6  # seconds that a layer of experts takes on top, for routing and more kernels
EXPERT_RATES = {"decode": 0.27, "train": 0.31}  # of products over experts, each of which has few rows
SLICES = 64  # of a rollout, in each of which the number of sequences that still decode is taken as constant


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and of completions; completions end at any token with the same probability."""

    prompt: float
    new: float


def full_lengths(config: RunConfig) -> Lengths:
    """Every prompt and every completion as long as the recipe allows."""
    return Lengths(config.data.max_prompt_tokens, config.rollout.max_new_tokens)


def decode_seconds(sizes: ModelSizes, card: Card, format: str, sequences: float, cached: float) -> float:
    """Seconds of a decode step of `sequences`, which reads `cached` bytes of keys and values, and replaces states."""
    read = (sizes.read_bytes(format, sequences) + cached + 2 * sequences * sizes.state_bytes) / (card.gb_per_s * 1e9)
    weights = _paced(sizes, DECODE_RATE / EXPERT_RATES["decode"]) + sizes.head
    computed = 2 * weights * sequences / (DECODE_RATE * card.tflops * 1e12)
    return sizes.layers * LAUNCH + len(sizes.decoder.sparse) * EXPERT_LAUNCH + read + computed


def step_seconds(
    config: RunConfig, sizes: ModelSizes, card: Card, micro_batches: MicroBatchPlan | None, lengths: Lengths
) -> dict[str, float]:
    """Seconds per optimizer step by phase; a rollout serves `loss.num_iterations` of them."""
    if not config.kind.samples:
        return {"training": _seconds_of_rows(config, sizes, card, micro_batches)}
    rollout = config.rollout
    sequences = rollout.prompts_per_step * rollout.group_size
    rate = TRAIN_RATE * card.tflops * 1e12
    prefilled = sequences if sizes.states else rollout.prompts_per_step  # the engine keeps no states of a prompt
    prefill = 2 * _paced(sizes) * lengths.prompt * prefilled / rate
    rows, tokens_at_once = largest_rows(config, sizes, micro_batches, lengths)
    recomputed = micro_batches.recomputed(tokens_at_once) / sizes.layers if micro_batches else 0.0
    prompts = rollout.prompts_per_step * -(-rollout.group_size // rows)  # each micro-batch computes a prompt once
    tokens = prompts * lengths.prompt + sequences * lengths.new
    flops = _flops(config, recomputed) * _paced(sizes) * tokens + 4 * sizes.head * sequences * lengths.new
    passes = max(1.0, tokens / max(tokens_at_once, 1))  # one per micro-batch
    beside = _gradient_seconds(config, sizes, card, tokens)
    beside += _expert_seconds(config, sizes, card, passes, recomputed) + _linear_seconds(sizes, card, passes, tokens)
    decoding = -(-sequences // MAX_SEQUENCES) * _decoding(config, sizes, card, lengths)
    if rollout.carry_over:
        carried, decoding = _carried_over(config, sizes, card, lengths)
        prefill += 2 * _paced(sizes) * carried / rate
    taught = teacher_flops(config.distill, sizes, tokens, sequences * lengths.new)
    if rounds_to_four_bits(config.qat, sizes):
        beside += (1 + recomputed) * passes * rounding_seconds(sizes, card, tokens / passes)
    return {
        "rollout": (decoding + prefill) / config.loss.num_iterations,
        **({"teacher": taught / rate} if taught else {}),
        "training": flops / rate + beside,
    }


def _seconds_of_rows(config: RunConfig, sizes: ModelSizes, card: Card, micro_batches: MicroBatchPlan | None) -> float:
    """Seconds of a step on given rows that all have the greatest length and are learned as a whole."""
    tokens = config.rows_per_step * config.longest_row
    at_once = config.longest_row if micro_batches is None else micro_batches.micro_batch_tokens
    recomputed = micro_batches.recomputed(at_once) / sizes.layers if micro_batches else 0.0
    flops = (_flops(config, recomputed) * _paced(sizes) + 4 * sizes.head) * tokens
    passes = max(1.0, tokens / at_once)
    beside = _expert_seconds(config, sizes, card, passes, recomputed) + _linear_seconds(sizes, card, passes, tokens)
    return flops / (TRAIN_RATE * card.tflops * 1e12) + _gradient_seconds(config, sizes, card, tokens) + beside


def _flops(config: RunConfig, recomputed: float) -> float:
    """Per weight of the body and token, in 16 bits: forward, for the share `recomputed` twice, and to the input."""
    scales, products = config.train.fp8
    rounded = ROUNDED_SHARE if scales else 1
    return 2 * (1 + recomputed) * (rounded if products == "all" else 1) + 2 * rounded


def _gradient_seconds(config: RunConfig, sizes: ModelSizes, card: Card, tokens: float) -> float:
    """Seconds of the products of whole weights' gradients, which `blockwise` leaves in 16 bits."""
    what = trainee(config.adapter, config.qat, config.model.format, config.optim.name)
    rounded = ROUNDED_SHARE if config.train.fp8[0] == "tensorwise" else 1
    return rounded * 2 * what.trained(sizes).count * tokens / (card.tflops * 1e12) if what.gradient_bytes else 0.0


def _paced(sizes: ModelSizes, slower: float = TRAIN_RATE / EXPERT_RATES["train"]) -> float:
    """The weights that a token is multiplied by; experts' weights count `slower` times."""
    return sizes.outside_experts + (sizes.active - sizes.outside_experts) * slower


def _expert_seconds(config: RunConfig, sizes: ModelSizes, card: Card, passes: float, recomputed: float) -> float:
    """Seconds in which `passes` micro-batches decode all packed experts: read them, and write them in 16 bits."""
    format = formats.get(config.model.format)
    moved = sizes.of_experts * (format.bytes_per_weight + 2) if format.quantized else 0.0
    return passes * (2 + recomputed) * moved / (card.gb_per_s * 1e9)


def _linear_seconds(sizes: ModelSizes, card: Card, passes: float, tokens: float) -> float:
    """What layers with linear attention take beside their products in `passes` micro-batches of `tokens` in all."""
    if sizes.states is None:
        return 0.0
    return len(sizes.decoder.linear) * LINEAR_S * max(passes, tokens / busy_tokens(sizes, card))


def largest_rows(
    config: RunConfig, sizes: ModelSizes, micro_batches: MicroBatchPlan | None, lengths: Lengths
) -> tuple[int, int]:
    """(rows, tokens) of the largest micro-batch of a step whose rows all have these lengths."""
    budget = 0 if micro_batches is None else micro_batches.micro_batch_tokens
    rollout = config.rollout
    prompt, new = round(lengths.prompt), max(1, round(lengths.new))
    least = 0 if sizes.states is None else BEGUN
    return largest_micro_batch(budget, rollout.prompts_per_step, rollout.group_size, prompt, new, least)


def _decoding(config: RunConfig, sizes: ModelSizes, card: Card, lengths: Lengths) -> float:
    """Seconds of decoding as many sequences as fit at once, from the first token to the end of the longest one."""
    rollout, kv_bytes = config.rollout, sizes.kv_bytes(config.rollout.kv_cache_dtype)
    started = min(rollout.prompts_per_step * rollout.group_size, MAX_SEQUENCES)
    scale = _scale(min(lengths.new / rollout.max_new_tokens, 1.0))
    seconds, idle = 0.0, _decode_step(config, sizes, card, 0, 0)
    for part in range(SLICES):
        middle = (part + 0.5) / SLICES
        share = math.exp(-middle / scale)  # of the sequences, which has not ended
        cached = started * share * sizes.seen_tokens(lengths.prompt + middle * rollout.max_new_tokens) * kv_bytes
        step = _decode_step(config, sizes, card, started * share, cached)
        seconds += step - (1 - share) ** started * idle  # no step at all if every sequence has ended
    return seconds * rollout.max_new_tokens / SLICES


def _decode_step(config: RunConfig, sizes: ModelSizes, card: Card, sequences: float, cached: float) -> float:
    rounding = rounding_seconds(sizes, card, sequences) if rounds_to_four_bits(config.qat, sizes) else 0.0
    return decode_seconds(sizes, card, config.model.format, sequences, cached) + rounding


def _carried_over(config: RunConfig, sizes: ModelSizes, card: Card, lengths: Lengths) -> tuple[float, float]:
    """(tokens that are computed again, seconds of decoding) of a step that leaves what is unfinished to the next one.

    As many sequences as a step has are sampled all the time, so a step takes as many decode steps as its completions
    have tokens on average. Those that go on are as far as the running ones are on average.
    """
    rollout, kv_bytes = config.rollout, sizes.kv_bytes(config.rollout.kv_cache_dtype)
    sequences = rollout.prompts_per_step * rollout.group_size
    at_once, scale = min(sequences, MAX_SEQUENCES), _scale(min(lengths.new / rollout.max_new_tokens, 1.0))
    middles = [(part + 0.5) / SLICES for part in range(SLICES)]
    running = [math.exp(-middle / scale) for middle in middles]  # the share of the sequences that get so far
    mean_tokens = rollout.max_new_tokens * sum(map(math.prod, zip(middles, running, strict=True))) / sum(running)
    cached = at_once * sizes.seen_tokens(lengths.prompt + mean_tokens) * kv_bytes
    step = _decode_step(config, sizes, card, at_once, cached)
    carried = 0.0 if math.isinf(scale) else at_once * mean_tokens  # equal lengths end together
    return carried, lengths.new * sequences / at_once * step


def _scale(share: float) -> float:
    """Of an exponential distribution that is cut off at 1 and then has the mean `share`; infinite for a share of 1."""
    if share >= 1.0:
        return math.inf
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if -middle * math.expm1(-1 / middle) < share else (low, middle)
    return low
