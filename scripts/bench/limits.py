"""The least work that a step needs, which is counted, and the speed of the card, which is measured.

A share of the limit is the ratio of the two. Only products with weights are counted. Those within attention, and the
adapter's in training, are left out, so that shares come out too low rather than too high. A prompt that a group shares
counts once, and recomputation does not count. Of experts those count that tokens are multiplied by, as if all experts
were chosen equally often.
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
    """Measure the card: TFLOP/s of a bfloat16 product of 8192 cubed, in a burst and over a second, and GB/s of a copy.

    The rate of the copy counts bytes read and bytes written.
    """
    burst, sustained = matrix_tflops(), matrix_tflops(repeats=700)
    return {"tflops": burst, "sustained_tflops": sustained, "gb_per_s": copy_gb_per_s()}


def matrix_tflops(repeats: int = 10) -> float:
    """TFLOP/s of a large bfloat16 product. Takes 0.4 GiB.

    With few repeats it is the rate of a rested card, which a phase of seconds cannot reach because of the power limit.
    """
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b, repeats) / 1e12


def copy_gb_per_s() -> float:
    import torch

    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9


def seconds_of(call: Callable[[], object], repeats: int = 10) -> float:
    """Seconds that one call takes on the card."""
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
    """The shape of a step's work."""

    sizes: ModelSizes
    adapter: int  # parameters outside experts
    expert_adapter: int  # and on all experts
    weight_bytes: float  # per weight of the decoder's linears
    kv_bytes: int  # per cached token
    prompts: int
    group: int
    prompt_tokens: int

    @classmethod
    def of(cls, config: RunConfig, sizes: ModelSizes) -> Work:
        """The work of a run whose prompts all have the maximum length, as those of bench_step do."""
        from qerl import formats
        from qerl.plan.trained import expert_parameters

        return cls(
            sizes,
            sizes.adapter(config.adapter.rank, config.adapter.targets),
            expert_parameters(config.adapter, sizes),
            formats.get(config.model.format).bytes_per_weight,
            sizes.kv_bytes(config.rollout.kv_cache_dtype),
            config.rollout.prompts_per_step,
            config.rollout.group_size,
            config.data.max_prompt_tokens,
        )

    @property
    def layers_flops(self) -> float:
        """Of a token's forward pass through the layers, routers included: 2 per weight."""
        return 2.0 * (self.sizes.active + self.sizes.routers)


def training_flops(work: Work, step: dict[str, Any], weights: bool = False) -> float:
    """The flops that training needs in a step of metrics.jsonl.

    They are 2 per weight and token forward, and 2 for the gradient to the input: in the decoder for the tokens of all
    completions and of each prompt once, in the head for completion tokens (it computes its slope instead). No gradient
    goes through a router. Rows without a learning signal need none, so the sum is multiplied by the share of the rows
    that were trained on.
    """
    completions = work.prompts * work.group * step["completions/mean_tokens"]
    tokens = completions + work.prompts * work.prompt_tokens
    passes = 2 if weights else 1
    flops = (work.layers_flops + passes * 2 * work.sizes.active) * tokens + 4 * work.sizes.head * completions
    return flops * step.get("completions/trained_share", 1.0)


def train_share(work: Work, step: dict[str, Any], tflops: float) -> float:
    """The share of the matrix rate that training reached, by the step's own seconds of training."""
    return training_flops(work, step) / step["time/train_s"] / (tflops * 1e12)


def decode_bytes(work: Work, sequences: Sequence[float], context_tokens: float) -> dict[str, float]:
    """The bytes that decode steps with so many `sequences` each read: per step the packed body, the 16-bit routers and
    head, and the adapter, and the keys and values of `context_tokens`, the sum over steps and sequences of the tokens
    that each attends to."""
    sizes, steps = work.sizes, len(sequences)
    body = sum(map(sizes.met, sequences))
    adapter = steps * work.adapter + work.expert_adapter * sum(map(sizes.decoder.share_of, sequences))
    return {
        "weights": body * work.weight_bytes + steps * 2 * (sizes.routers + sizes.head),
        "adapter": 2 * adapter,
        "keys and values": context_tokens * work.kv_bytes,
    }


def decode_flops(work: Work, tokens: float) -> float:
    """2 flops per weight, adapter and head included, for each token that is sampled."""
    adapter = work.adapter + work.expert_adapter * work.sizes.decoder.share
    return (work.layers_flops + 2.0 * (work.sizes.head + adapter)) * tokens


def rollout_need(work: Work, lengths: Sequence[int]) -> dict[str, Any]:
    """Bytes and flops that a rollout with completions of `lengths` tokens needs.

    It needs as many steps as the longest completion has tokens, or as MAX_SEQUENCES sequences at a time take, and the
    products of each prompt once. The first token of a completion comes from its prompt, each later one from a step that
    attends to the prompt and the completion so far.
    """
    from qerl.plan.engine_memory import MAX_SEQUENCES

    sampled = sum(lengths)
    steps = max(max(lengths), -(-sampled // MAX_SEQUENCES))
    sequences = [sum(length > step for length in lengths) for step in range(steps)]
    if len(lengths) > MAX_SEQUENCES:
        sequences = [sampled / steps] * steps
    context = sum((length - 1) * (work.prompt_tokens + length / 2) for length in lengths)
    prefill = work.layers_flops * work.prompts * work.prompt_tokens
    return {"bytes": decode_bytes(work, sequences, context), "flops": decode_flops(work, sampled) + prefill}


def decode_need(model: str, rank: int, sequences: int, context: float) -> dict[str, Any]:
    """Bytes and flops of a decode step of a model folder with an adapter on all linears, at `context` tokens each.

    Experts share the outer factors of theirs, as they do by default.
    """
    from qerl.checkpoint.folder import format_of
    from qerl.plan.sizes import read_sizes

    sizes = read_sizes(model)
    adapters = sizes.adapter(rank, tuple(sizes.projections)), sizes.expert_adapter(rank, shared=True)
    width = format_of(Path(model)).bytes_per_weight
    work = Work(sizes, *adapters, width, sizes.kv_bytes(), sequences, 1, round(context))
    return {"bytes": decode_bytes(work, [sequences], sequences * context), "flops": decode_flops(work, sequences)}


def shares(need: dict[str, Any], seconds: float, limit: dict[str, float]) -> dict[str, Any]:
    """The needed bytes by kind and the flops, and the shares that they are of what the card can do in `seconds`."""
    return {
        "needed_gb": {name: count / 1e9 for name, count in need["bytes"].items()},
        "needed_tflop": need["flops"] / 1e12,
        "share_of_bandwidth": sum(need["bytes"].values()) / 1e9 / seconds / limit["gb_per_s"],
        "share_of_matrix_rate": need["flops"] / 1e12 / seconds / limit["tflops"],
    }
