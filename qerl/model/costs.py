"""What the trainer's forward pass takes, and which heads our decode attention serves, in numbers that plans need too.
No torch."""

from collections.abc import Callable

LOGIT_TOKENS = 1024  # whose logits exist at once: 0.6 GiB in float32 with a vocabulary of 152,000
# A repeated prompt keeps only keys and values, and this many of its tokens count as one: what a layer keeps for a
# token is between 6.7 (Llama 2 7B) and 68 times (Qwen2.5 3B) the size of its keys and values.
REPEATED = 6
BEGUN = 11  # tokens that a completion counts as at least, for the states that it goes on from: see `Shapes._hybrid`
# What a layer with linear attention takes of a micro-batch beside its products, in both directions: the host needs
# LINEAR_S at least, and an H200 as long for BUSY tokens times value heads (docs/lab/cost-model.md).
LINEAR_S, BUSY = 7e-3, 16384 * 32
HEAD_DIMS, GROUP = (32, 64, 128), 8  # of decode attention; the most query heads that may share a key head
UNRECORDED = 255  # in the recorded ids of experts: the choice is not known, and the trainer makes its own


def takes(heads: int, key_heads: int, head_dim: int) -> bool:
    """Whether the kernel of `qerl.model.decode_attention` serves such heads."""
    return head_dim in HEAD_DIMS and heads % key_heads == 0 and heads // key_heads <= GROUP


def kept_bytes(hidden: int, intermediate: int, query: int, key_value: int, rank: int, head_norms: bool = False) -> int:
    """Bytes per token and layer that our layers keep in 16 bits, with LoRA of `rank` on all linears.

    `query` and `key_value` are heads * head dimension; `head_norms` says that q and k are normed (Qwen3). For the sizes
    of a 7B model and rank 32 it is 121 KB. The layers of transformers and PEFT keep more than twice as much; a layer
    that takes their path (dropout) still does. One number per head and norm is left out. The tests measure it.
    """
    norms = 2 * 2 * hidden  # two norms, each of which keeps its input, the residual stream
    inputs = 2 * 2 * hidden  # of q/k/v and of gate/up
    attention = 2 * (2 * query + 2 * key_value)  # q, k and v, rotated in place, and the output
    if head_norms:
        attention += 2 * (query + key_value)  # q and k before their norms
    feed_forward = 2 * 2 * intermediate  # gate and up
    factors = 2 * 7 * rank
    return norms + inputs + attention + feed_forward + factors


def even_budget(budget: int, count: Callable[[int], int], ranks: int = 1) -> int:
    """The least budget with as many micro-batches as `budget` has, rounded up to as many for each of the ranks.

    `count` tells how many there are with a budget.
    """
    low, high, most = 1, budget, -(-count(budget) // ranks) * ranks
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) <= most else (middle + 1, high)
    return high
