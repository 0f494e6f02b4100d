"""What a step needs at least, by counting, and how fast the card is, by measuring: a share of the limit is their ratio.

Counted are the products with weights; attention's own, and the adapter's in training, are left out: shares come out low
rather than high. A prompt that a group shares is computed once, and recomputing is no need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.plan.sizes import ModelSizes


def limits() -> dict[str, float]:
    """Measured: TFLOP/s of a bfloat16 product of 8192 cubed, in a burst and over a second, GB/s of a copy (read and
    written)."""
    burst, sustained = matrix_tflops(), matrix_tflops(repeats=700)
    return {"tflops": burst, "sustained_tflops": sustained, "gb_per_s": copy_gb_per_s()}


def matrix_tflops(repeats: int = 10) -> float:
    """Of a rested card, which no phase of seconds reaches: its power limit comes first. Takes 0.4 GiB."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b, repeats) / 1e12


def copy_gb_per_s() -> float:
    import torch

    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9


def seconds_of(call: Callable[[], object], repeats: int = 10) -> float:
    """Of one call, on the card."""
    import torch

    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


@dataclass(frozen=True)
class Work:
    """A step's shape: the model, the adapter's parameters, what a weight of the body and a cached token take."""

    sizes: ModelSizes
    adapter: int
    weight_bytes: float
    kv_bytes: int
    prompts: int
    group: int
    prompt_tokens: int

    @classmethod
    def of(cls, config: RunConfig, sizes: ModelSizes) -> Work:
        """Of prompts that are all as long as they may be, as bench_step's are."""
        from qerl import formats

        return cls(
            sizes,
            sizes.adapter(config.adapter.rank, config.adapter.targets),
            formats.get(config.model.format).bytes_per_weight,
            sizes.kv_bytes(config.rollout.kv_cache_dtype),
            config.rollout.prompts_per_step,
            config.rollout.group_size,
            config.data.max_prompt_tokens,
        )


def training_flops(work: Work, step: dict[str, Any]) -> float:
    """Of a step of metrics.jsonl: 2 a weight and token forward and 2 for the gradient of the input, over completions
    and each prompt once in the decoder and over completion tokens in the head (which computes its slope instead).
    Rows without a learning signal need nothing: what the others need is counted as their share of the rows."""
    completions = work.prompts * work.group * step["completions/mean_tokens"]
    tokens = completions + work.prompts * work.prompt_tokens
    flops = 4 * (work.sizes.body * tokens + work.sizes.head * completions)
    return flops * step.get("completions/trained_share", 1.0)


def train_share(work: Work, step: dict[str, Any], tflops: float) -> float:
    """Of the matrix rate, by the step's own seconds of training."""
    return training_flops(work, step) / step["time/train_s"] / (tflops * 1e12)


def decode_bytes(work: Work, steps: int, context_tokens: float) -> dict[str, float]:
    """What `steps` decode steps read: packed body, 16-bit head and adapter once a step, and keys and values of
    `context_tokens`, the sum over steps and sequences of the tokens that each attends to."""
    return {
        "weights": steps * (work.sizes.body * work.weight_bytes + 2 * work.sizes.head),
        "adapter": steps * 2 * work.adapter,
        "keys and values": context_tokens * work.kv_bytes,
    }


def decode_flops(work: Work, tokens: float) -> float:
    """2 a weight, of adapter and head too, for each token that is sampled."""
    return 2.0 * (work.sizes.body + work.sizes.head + work.adapter) * tokens


def rollout_need(work: Work, lengths: Sequence[int]) -> dict[str, Any]:
    """Bytes and flops of a rollout with completions of `lengths` tokens: as many steps as the longest has, or as it
    takes with MAX_SEQUENCES at once, and the products of each prompt once. A completion's first token comes from its
    prompt, each later one from a step that attends to prompt and completion so far."""
    from qerl.plan.plan import MAX_SEQUENCES

    sampled = sum(lengths)
    steps = max(max(lengths), -(-sampled // MAX_SEQUENCES))
    context = sum((length - 1) * (work.prompt_tokens + length / 2) for length in lengths)
    prefill = 2.0 * work.sizes.body * work.prompts * work.prompt_tokens
    return {"bytes": decode_bytes(work, steps, context), "flops": decode_flops(work, sampled) + prefill}


def decode_need(model: str, rank: int, sequences: int, context: float) -> dict[str, Any]:
    """Bytes and flops of one decode step of a model folder with an adapter on all linears, at `context` tokens each."""
    from qerl.checkpoint.kinds import format_of
    from qerl.plan.sizes import read_sizes

    sizes = read_sizes(model)
    adapter = sizes.adapter(rank, tuple(sizes.projections))
    work = Work(sizes, adapter, format_of(Path(model)).bytes_per_weight, sizes.kv_bytes(), sequences, 1, round(context))
    return {"bytes": decode_bytes(work, 1, sequences * context), "flops": decode_flops(work, sequences)}


def shares(need: dict[str, Any], seconds: float, limit: dict[str, float]) -> dict[str, Any]:
    """Needed bytes by kind and flops, each with its share of what the card does in `seconds`."""
    return {
        "needed_gb": {name: count / 1e9 for name, count in need["bytes"].items()},
        "needed_tflop": need["flops"] / 1e12,
        "share_of_bandwidth": sum(need["bytes"].values()) / 1e9 / seconds / limit["gb_per_s"],
        "share_of_matrix_rate": need["flops"] / 1e12 / seconds / limit["tflops"],
    }
