#!/usr/bin/env python3
"""Attention in decode steps: our kernel against FlashAttention 3 as vLLM calls it; writes JSON.

    python3 scripts/bench/bench_attention.py --out attention-7b.json

One call writes the new tokens to the cache and attends. It is timed in a CUDA graph over more layers than the card's
cache holds. The limit is the bytes of keys and values divided by the bandwidth of a copy. `mixed` draws lengths from 64
to 1000 tokens. With --bits 8 the cache has e4m3 codes; FlashAttention then rounds queries to 8 bits as well, which is
timed with the rest. --architecture compute_80 also times what other cards run, as code of that capability which the
driver translates for this one. --splits 4x3,2x6 takes other numbers of warps and blocks than the kernels' own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYERS, PAGE = 8, 16
SEQUENCES, LENGTHS = (1, 8, 32, 128, 256), (140, 384, 640, 2048)
LONG = (48, 4224)  # sequences and tokens of one more row


def main() -> None:
    from scripts.bench.limits import copy_gb_per_s
    from scripts.bench.provenance import command, machine, require_card, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bits", type=int, choices=(16, 8), default=16)
    parser.add_argument("--architecture", help="compute_80, or for 8 bits compute_89")
    parser.add_argument("--splits", help="for few and for many heads, as WARPSxBLOCKS,WARPSxBLOCKS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card("vllm")
    bandwidth = copy_gb_per_s()
    cases = [*((sequences, length) for sequences in SEQUENCES for length in (*LENGTHS, "mixed")), LONG]
    rows = [row(arguments, sequences, length, bandwidth) for sequences, length in cases]
    write({"command": command(), **machine(), "gb_per_s": bandwidth, "us": rows}, arguments.out)
    for entry in rows:
        print("  ".join(f"{name} {value!s:>6}" for name, value in entry.items()))


def builds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our kernel as this card has it, and as others do."""
    import torch

    from qerl.model.decode_attention import OTHERS, Split, build_for

    found = {"ours": build_for(torch.device("cuda", 0), arguments.bits)}
    if arguments.architecture:
        found["others"] = OTHERS[arguments.bits]._replace(architecture=arguments.architecture)
    if arguments.splits:
        few, many = (Split(*map(int, one.split("x"))) for one in arguments.splits.split(","))
        found = {name: build._replace(few=few, many=many) for name, build in found.items()}
    return found


def row(arguments: argparse.Namespace, sequences: int, length: int | str, bandwidth: float) -> dict[str, Any]:
    import torch

    from qerl.formats.nvfp4.tuning import graph_us

    low, longest = (64, 1000) if length == "mixed" else (length, length)
    generator = torch.Generator("cuda").manual_seed(sequences)
    lengths = torch.randint(low, longest + 1, (sequences,), generator=generator, device="cuda", dtype=torch.int32)
    times = {name: graph_us([call]) for name, call in calls(arguments, lengths, longest).items()}
    needed = 2 * int(lengths.sum()) * arguments.key_heads * arguments.head_dim * arguments.bits // 8
    return {
        "sequences": sequences,
        "tokens": length,
        **{name: round(us / LAYERS, 2) for name, us in times.items()},
        "limit": round(needed / bandwidth / 1e3, 2),
    }


def calls(arguments: argparse.Namespace, lengths: Any, longest: int) -> dict[str, Callable[[], None]]:
    """Functions that do the same work for all layers, by our kernel (`builds`) and by vLLM's."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    from qerl.model.decode_attention import Batch, Cache, Space, attend_

    heads, key_heads, dim = arguments.heads, arguments.key_heads, arguments.head_dim
    count, pages = len(lengths), -(-longest // PAGE)
    numbers = {"device": "cuda", "dtype": torch.bfloat16}
    one, eight = torch.ones((), device="cuda"), arguments.bits == 8
    layers = []
    for _ in range(LAYERS):
        tensor = torch.randn(count * pages, 2, PAGE, key_heads, dim, **numbers)
        stored = tensor.to(torch.float8_e4m3fn).view(torch.uint8) if eight else tensor
        layers.append(Cache(*stored.unbind(1), (one, one) if eight else (None, None)))
    table = torch.randperm(count * pages, device="cuda").int().view(count, pages)
    last = (lengths - 1).long()
    slots = table.gather(1, last[:, None] // PAGE)[:, 0].long() * PAGE + last % PAGE
    query, key, value = (torch.randn(count, n, dim, **numbers) for n in (heads, key_heads, key_heads))
    out, scale, batch = torch.empty_like(query), dim**-0.5, Batch(table, lengths, slots)
    sizes = count, key_heads, dim, query.device, arguments.bits
    spaces = {name: Space(*sizes, build) for name, build in builds(arguments).items()}
    for space in spaces.values():
        space.plan_(lengths)
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "max_seqlen_k": longest, "causal": True}
    options |= {"window_size": [-1, -1], "num_splits": 32}  # vLLM's limit in CUDA graphs
    shape = {"batch_size": count, "num_heads_q": heads, "num_heads_kv": key_heads, "headdim": dim, "page_size": PAGE}
    kind = torch.float8_e4m3fn if eight else torch.bfloat16
    schedule = get_scheduler_metadata(**shape, **options, cache_seqlens=lengths, qkv_dtype=kind)
    descale = one.expand(count, key_heads)
    rounded = {"q_descale": descale, "k_descale": descale, "v_descale": descale} if eight else {}

    def ours(space: Space) -> None:
        for cache in layers:
            attend_(out, (query, key, value), cache, batch, scale, space)

    def flash() -> None:
        for cache in layers:
            keys, values = (part.view(kind) for part in (cache.keys, cache.values))
            ops.reshape_and_cache_flash(
                key, value, cache.keys, cache.values, slots, "fp8" if eight else "auto", one, one
            )
            inputs = {"q": query.to(kind), "k": keys, "v": values, "out": out, "block_table": table, **rounded}
            inputs |= {"seqused_k": lengths, "softmax_scale": scale, "scheduler_metadata": schedule, "fa_version": 3}
            flash_attn_varlen_func(**inputs, **options)

    return {**{name: partial(ours, space) for name, space in spaces.items()}, "flash": flash}


if __name__ == "__main__":
    main()
