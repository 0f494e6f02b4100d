"""How many bytes a decoder layer keeps for its backward pass: what the planner of micro-batches counts with."""

from __future__ import annotations


def kept_bytes(
    hidden: int, intermediate: int, query: int, key_value: int, rank: int, *, heads: int, head_norms: bool = False
) -> int:
    """Bytes a token and layer of our layers in 16 bit with LoRA of `rank` on all linears; measured in the tests.

    `query` and `key_value` are heads * head dimension; `head_norms`: q and k are normed (Qwen3). At 7B's sizes and rank
    32 that is 121 KB, where transformers' and PEFT's layers keep more than twice as much.
    """
    norms = 2 * (2 * hidden + 4)  # each: its input, which is the residual stream, and 1 / rms in float32
    inputs = 2 * 2 * hidden  # of q/k/v and of gate/up
    attention = 2 * (2 * query + 2 * key_value) + 4 * heads  # q, k, v rotated in place, output, logsumexp
    if head_norms:
        attention += 2 * (query + key_value) + 4 * heads * (query + key_value) // query  # before the norms; 1 / rms
    feed_forward = 2 * 2 * intermediate  # gate and up
    factors = 2 * 7 * rank
    return norms + inputs + attention + feed_forward + factors
