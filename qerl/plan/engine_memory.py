"""How much GPU memory the engine may take: a budget for rollouts inside a limit for the whole process. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qerl.errors import CAP_GIB, MEMORY, EngineError

GIB = 2**30
DEFAULT_SHARE = 0.85  # of the limit, or less where the rest cannot hold what lies outside the budget
GRAPH_RESERVE = GIB  # CUDA graphs and the context, which vLLM does not count (0.5 to 0.8 GiB at 7B)
CONTEXT = int(0.5 * GIB)  # of CUDA, where nothing has been computed
KERNELS = int(1.25 * GIB)  # loaded and compiled, cuBLAS's work space, torch's fragments: as in rollouts of a 7B
GRAPHS = int(0.6 * GIB)  # CUDA graphs of the engine
WORK_RESERVE = 2 * GIB  # activations and logits of the largest batch, roughly: only for errors before any long work


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes. `limit`: what the process may hold at any time; `budget`: what it may hold during a rollout."""

    limit: int
    budget: int

    def utilization(self, total: int, needed: int | None = None) -> float:
        """vLLM's `gpu_memory_utilization` for this budget on a card of `total` bytes; where it is known that `needed`
        bytes are enough, for those: vLLM asks that so much be free, and a card may be shared."""
        return (min(self.budget, needed or self.budget) - GRAPH_RESERVE) / total


def plan_memory(
    total: int, weights: int, memory: float | None, cap_gib: float | None, outside: int = 0, quantized: bool = False
) -> MemoryPlan:
    """Plan for a card of `total` bytes and a checkpoint of `weights` bytes; `outside`: see `outside_bytes`.

    `memory`: GiB if above 1, else a share of the limit, None: 0.85, or what `outside` leaves if that is less.
    `cap_gib`: limit of the whole process. `quantized`: whether the base is, for the advice. Raises EngineError if the
    weights do not fit with room to work.
    """
    if memory is not None and memory <= 0:
        raise EngineError("%s is not a budget: write GiB (12.5) or a share (0.8)", MEMORY.set_to(f"{memory}"))
    limit, budget = budget_bytes(total, memory, cap_gib, outside)
    if budget > limit:
        raise EngineError(
            "%s asks for %.1f GiB and the limit is %.1f GiB (%s): write a smaller %s",
            *(MEMORY, budget / GIB, limit / GIB, CAP_GIB if cap_gib else "the card", MEMORY),
        )
    needed = least_bytes(weights)
    if needed > budget:
        keys = [MEMORY] if needed + outside <= limit else [CAP_GIB] * (limit < total)
        raise EngineError(
            "the weights take %.1f GiB and sampling at least %.1f GiB more, but the rollout may hold %.1f GiB: "
            f"{'raise %s, or ' * len(keys)}take {smaller_base(quantized)}",
            *(weights / GIB, (needed - weights) / GIB, budget / GIB, *keys),
        )
    return MemoryPlan(limit, budget)


def smaller_base(quantized: bool) -> str:
    """What there is to take instead of a base that does not fit."""
    return "a smaller base" if quantized else "a smaller or quantized base"


def budget_bytes(total: int, memory: float | None, cap_gib: float | None, outside: int = 0) -> tuple[int, int]:
    """Limit of the process and budget of a rollout, as they were asked for; see `plan_memory`."""
    limit = total if cap_gib is None else min(total, int(cap_gib * GIB))
    if memory is None:
        return limit, max(0, min(int(DEFAULT_SHARE * limit), limit - outside))
    return limit, int(memory * GIB) if memory > 1 else int(memory * limit)


def outside_bytes(trainer: int, sequences: int, vocabulary: int) -> int:
    """What a rollout of so many sequences takes outside its budget; `trainer`: adapter and optimizer state."""
    return trainer + CONTEXT + KERNELS + GRAPHS - GRAPH_RESERVE + sampler_bytes(sequences, vocabulary)


def least_bytes(weights: int) -> int:
    """Without which a rollout of any size cannot be."""
    return weights + GRAPH_RESERVE + WORK_RESERVE


KV_CACHE_DTYPES = ("auto", "fp8", "fp8_per_token_head")


def kv_head_bytes(kv_cache_dtype: str, head_dim: int) -> int:
    """Bytes of the key (or value) of one token and head; with scales of their own, a float32 each."""
    return {"auto": 2 * head_dim, "fp8": head_dim, "fp8_per_token_head": head_dim + 4}[kv_cache_dtype]


def kv_bytes_per_token(config: Any, kv_cache_dtype: str = "auto") -> int:
    """Bytes of keys and values of one token, from a transformers config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * kv_head_bytes(kv_cache_dtype, head_dim)


def sampler_bytes(sequences: int, vocabulary: int) -> int:
    """What vLLM counts for penalties, asked for or not: an int32 a token and sequence, and a bit of its prompt's."""
    return 4 * sequences * (vocabulary + -(-vocabulary // 32))


def engine_bytes(weights: int, kv_cache: int) -> int:
    """What an engine takes whose KV cache has so many bytes."""
    return weights + kv_cache + GRAPH_RESERVE + 2 * WORK_RESERVE


def kv_cache_bytes(plan: MemoryPlan, weights: int, tokens: int, per_token: int) -> int | None:
    """Size of the KV cache if `tokens` certainly fit in the budget; None: as much as vLLM's profile finds room for."""
    wanted = int(tokens * per_token * 1.02) + 64 * 2**20
    return wanted if engine_bytes(weights, wanted) <= plan.budget else None
