"""How many bytes a decoder layer keeps for its backward pass: what the planner of micro-batches counts with."""

from __future__ import annotations


def kept_bytes(hidden: int, intermediate: int, query: int, key_value: int, rank: int, head_norms: bool = False) -> int:
    """Bytes a token and layer of our layers in 16 bit with LoRA of `rank` on all linears; measured in the tests.

    `query` and `key_value` are heads * head dimension; `head_norms`: q and k are normed (Qwen3). At 7B's sizes and
    rank 32 that is 121 KB; transformers' and PEFT's layers keep more than twice as much, and a layer that takes their
    path (dropout) still does. Left out: a number a head and a norm.
    """
    norms = 2 * 2 * hidden  # each: its input, which is the residual stream
    inputs = 2 * 2 * hidden  # of q/k/v and of gate/up
    attention = 2 * (2 * query + 2 * key_value)  # q, k, v rotated in place, output
    if head_norms:
        attention += 2 * (query + key_value)  # before the norms
    feed_forward = 2 * 2 * intermediate  # gate and up
    factors = 2 * 7 * rank
    return norms + inputs + attention + feed_forward + factors
