"""How much GPU memory the engine may take, and the cards that `qerl plan` knows. Pure numbers, no torch.

`plan_memory` divides a limit for the whole process: a budget for rollouts inside it, and the room that training needs.
A card is known by its memory, bandwidth and rate.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from qerl.base.devices import BF16_CAPABILITY, FP8_CAPABILITY
from qerl.base.errors import CAP_GIB, MEMORY, ConfigError, EngineError


@dataclass(frozen=True)
class Card:
    """Memory as the driver reports it, copy bandwidth, and the rate of a large bfloat16 product.

    Bandwidth and rate were measured, or are 85% of the data sheet's for cards that were not available.
    """

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float
    ranks: int = 1  # cards that share a run, of which this is one
    capability: tuple[int, int] | None = None  # what the card can compute; None: not known, and nothing is refused

    @property
    def has_bf16(self) -> bool:
        return self.capability is None or self.capability >= BF16_CAPABILITY

    @property
    def has_fp8(self) -> bool:
        return self.capability is None or self.capability >= FP8_CAPABILITY


_KNOWN = {  # capability -> name, GiB, GB/s, TFLOPS; GeForce cards add float32 at half the rate, which counts
    (8, 6): (
        *(("3090", 23.6, 796, 60), ("3060", 11.7, 306, 22), ("3060-ti", 7.7, 381, 28), ("3070", 7.7, 381, 35)),
        *(("3070-ti", 7.7, 517, 37), ("3080", 9.7, 646, 51), ("3080-ti", 11.7, 775, 58), ("3090-ti", 23.6, 857, 68)),
        *(("a10", 22.1, 510, 106), ("a10g", 22.1, 510, 60), ("a40", 44.5, 592, 127)),
        *(("a5000", 23.6, 653, 94), ("a6000", 47.4, 653, 131)),
    ),
    (8, 9): (
        *(("4090", 23.6, 857, 140), ("4060", 7.7, 231, 26), ("4060-ti", 7.7, 245, 38), ("4060-ti-16", 15.6, 245, 38)),
        *(("4070", 11.7, 428, 50), ("4070-super", 11.7, 428, 60), ("4070-ti", 11.7, 428, 68)),
        *(("4070-ti-super", 15.6, 571, 75), ("4080", 15.6, 609, 83), ("4080-super", 15.6, 626, 89)),
        *(("l4", 22.1, 255, 103), ("l40", 44.5, 734, 154), ("l40s", 44.5, 734, 180), ("6000-ada", 47.4, 816, 310)),
    ),
    (12, 0): (
        *(("5090", 31.4, 1523, 178), ("5060", 7.7, 381, 33), ("5060-ti", 7.7, 381, 40), ("5060-ti-16", 15.6, 381, 40)),
        *(("5070", 11.7, 571, 52), ("5070-ti", 15.6, 762, 75), ("5080", 15.6, 816, 96)),
        ("pro-6000", 94.9, 1523, 428),
    ),
    (8, 0): (("a100-40", 39.4, 1322, 265), ("a100", 79.2, 1733, 265), ("a30", 23.6, 793, 140)),
    (9, 0): (("h100", 79.2, 2848, 690), ("h100-nvl", 93.6, 3347, 585), ("h200", 139.8, 4200, 690)),
    (10, 0): (("b200", 178.3, 6800, 1912),),
    (7, 5): (("t4", 14.6, 272, 55), ("2080-ti", 10.7, 524, 46)),
    (7, 0): (("v100", 15.8, 765, 106), ("v100-32", 31.7, 765, 106)),
}
CARDS = {name: Card(name, *rest, capability=able) for able, cards in _KNOWN.items() for name, *rest in cards}
SAID_BESIDE = r"nvidia|geforce|rtx|tesla|blackwell|generation|(workstation|server) edition|pcie|sxm\d?|hbm\d?e?|gpu"
SAME_SIZE = 0.05  # the memory that a card reports differs by less than this share from the table


def card_of(text: str) -> Card:
    """The card of a name (`rtx 4090`, `A100-SXM4-80GB`), or a card of some GiB (`24`, `24GB`) as fast as the known card
    of that size.

    Raises ConfigError for anything else.
    """
    size = re.sub(r"(?<=\d)\s*gi?b\b", "", text.lower())
    given = re.sub(rf"{SAID_BESIDE}|\s|(?<=\w)[_-]", "", size)
    for card in CARDS.values():
        name = card.name.replace("-", "")
        if given in (name, f"{name}{_gb(card)}"):
            return card
    trained_on = ", ".join(name for name, card in CARDS.items() if card.has_bf16)
    try:
        gib = float(size.replace("_", "x"))
    except ValueError:
        raise ConfigError(
            f"--gpu {text!r} is not known (cards are NVIDIA's): write GiB (24) or one of {trained_on}"
        ) from None
    if not 0 < gib < 1024:
        raise ConfigError(f"--gpu {text} is not a size of memory: write GiB, such as 24 or 80, or one of {trained_on}")
    nearest = min((card for card in CARDS.values() if card.has_bf16), key=lambda card: abs(card.memory_gib - gib))
    return Card(f"a card of {gib:g} GiB, as fast as {nearest.name}", gib, nearest.gb_per_s, nearest.tflops)


def card_named(name: str, gib: float) -> Card | None:
    """The known card of a driver's name, `NVIDIA A100-SXM4-40GB`, and of `gib` GiB; None if there is none.

    Of another size (a laptop's 4090 has 16 GiB) it is as fast as the known card.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())

    def named(card: Card) -> int:
        own = card.name.removesuffix(f"-{_gb(card)}").split("-")
        return len(own) if own in [words[at : at + len(own)] for at in range(len(words))] else 0

    longest = max(map(named, CARDS.values()))  # 4070 ti, not 4070
    found = [card for card in CARDS.values() if longest and named(card) == longest]
    if not found:
        return None
    nearest = min(found, key=lambda card: abs(card.memory_gib - gib))
    if abs(nearest.memory_gib - gib) <= SAME_SIZE * gib:
        return nearest
    return replace(nearest, name=f"a card of {gib:g} GiB, as fast as {nearest.name}", memory_gib=gib)


def _gb(card: Card) -> int:
    """As it is sold: 24 GB of a 3090, 40 of an A100."""
    sold = (8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)
    return min(sold, key=lambda gb: abs(gb - card.memory_gib))


GIB = 2**30
MAX_SEQUENCES = 256  # that vLLM samples at once; a larger call is served in turn
MAX_BATCHED_TOKENS = 8192  # of a prefill; vLLM's 16384 takes twice the activations and is no faster for rollouts
DEFAULT_SHARE = 0.85  # of the limit; less if the rest would be too small for what lies outside the budget
GRAPH_RESERVE = GIB  # for CUDA graphs and the context, which vLLM does not count (0.5 to 0.8 GiB for a 7B)
CONTEXT = int(0.5 * GIB)  # a CUDA context before anything has been computed
KERNELS = int(1.25 * GIB)  # loaded kernels, cuBLAS's workspace and torch's fragments, as in rollouts of a 7B
GRAPHS = int(0.6 * GIB)  # CUDA graphs of the engine
WORK_RESERVE = 2 * GIB  # roughly the activations and logits of the largest batch; only used to refuse early


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes. `limit`: what the process may hold at any time; `budget`: what it may hold during a rollout."""

    limit: int
    budget: int

    def utilization(self, total: int, needed: int | None = None) -> float:
        """vLLM's `gpu_memory_utilization` for this budget on a card of `total` bytes.

        vLLM refuses to start unless that share of the card is free. On a shared card it is therefore better to ask for
        `needed` bytes only, where those are known to be enough.
        """
        return (min(self.budget, needed or self.budget) - GRAPH_RESERVE) / total


def plan_memory(
    total: int, weights: int, memory: float | None, cap_gib: float | None, outside: int = 0, quantized: bool = False
) -> MemoryPlan:
    """Plan for a card of `total` bytes and a checkpoint of `weights` bytes; for `outside` see `outside_bytes`.

    `memory` above 1 is in GiB, otherwise it is a share of the limit; None means 0.85, or what `outside` leaves if that
    is less. `cap_gib` limits the whole process. Whether the base is `quantized` matters for the advice only. Raises
    EngineError if the weights and room to work do not fit.
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
    """The kind of base to advise where this one does not fit."""
    return "a smaller base" if quantized else "a smaller or quantized base"


def budget_bytes(total: int, memory: float | None, cap_gib: float | None, outside: int = 0) -> tuple[int, int]:
    """The limit of the process and the budget of a rollout that were asked for; see `plan_memory`."""
    limit = total if cap_gib is None else min(total, int(cap_gib * GIB))
    if memory is None:
        return limit, max(0, min(int(DEFAULT_SHARE * limit), limit - outside))
    return limit, int(memory * GIB) if memory > 1 else int(memory * limit)


def outside_bytes(trainer: int, sequences: int, vocabulary: int) -> int:
    """What a rollout of `sequences` takes outside its budget; `trainer` is the adapter and the optimizer state."""
    return trainer + CONTEXT + KERNELS + GRAPHS - GRAPH_RESERVE + sampler_bytes(sequences, vocabulary)


def grown_by_others(increase: int) -> int:
    """How much of what a card holds outside torch has grown by other processes, while an engine opened.

    `increase` is what vLLM's profile takes for the engine's own. A context, kernels and graphs are; what goes beyond
    these, or below zero, others have taken or given back.
    """
    return increase - min(max(increase, 0), CONTEXT + KERNELS + GRAPHS)


def least_bytes(weights: int) -> int:
    """The least budget with which any rollout can run."""
    return weights + GRAPH_RESERVE + WORK_RESERVE


def kv_head_bytes(kv_cache_dtype: str, head_dim: int) -> int:
    """Bytes of the key (or the value) of one token in one head, with its float32 scale if it has one of its own."""
    return {"auto": 2 * head_dim, "fp8": head_dim, "fp8_per_token_head": head_dim + 4}[kv_cache_dtype]


def kv_bytes_per_token(config: Any, kv_cache_dtype: str = "auto") -> int:
    """Bytes of keys and values of one token, from a transformers config; layers with linear attention have none."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers - (getattr(config, "layer_types", None) or []).count("linear_attention")
    return 2 * layers * heads * kv_head_bytes(kv_cache_dtype, head_dim)


def sampler_bytes(sequences: int, vocabulary: int) -> int:
    """What vLLM always allocates for penalties: per sequence and token of the vocabulary an int32 and a bit."""
    return 4 * sequences * (vocabulary + -(-vocabulary // 32))


def engine_bytes(weights: int, kv_cache: int) -> int:
    """What an engine with a KV cache of `kv_cache` bytes takes."""
    return weights + kv_cache + GRAPH_RESERVE + 2 * WORK_RESERVE


def kv_cache_bytes(plan: MemoryPlan, weights: int, tokens: int, per_token: int) -> int | None:
    """The size of the KV cache for `tokens` if that certainly fits in the budget.

    None leaves it to vLLM, which measures and takes what is left.
    """
    wanted = int(tokens * per_token * 1.02) + 64 * 2**20
    return wanted if engine_bytes(weights, wanted) <= plan.budget else None


def chosen_bytes(plan: MemoryPlan, weights: int, per_token: int, chosen: int) -> int:
    """What the choices of routers take of a budget, `chosen` bytes for each token of a KV cache that fills the rest."""
    return (plan.budget - weights) * chosen // (per_token + chosen)
