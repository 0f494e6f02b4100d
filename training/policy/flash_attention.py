"""Flash attention within the sequences of a packed row: torch's, with vLLM's forward pass on Hopper.

FlashAttention 3's forward pass returns all that FlashAttention 2's backward pass reads, so the backward pass is torch's
in both cases. The twin is `packed_attention.attend_each`.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache

import torch
from torch.autograd.function import once_differentiable

from training.policy.packing import Sequences

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (T, heads, d), (keys, kv heads, d) and (keys, kv heads, d)


def attend(qkv: QKV, sequences: Sequences, scale: float | None, window: int | None) -> torch.Tensor:
    """(T, heads, d), on CUDA in 16 bit. If a sequence has fewer queries than keys, its queries are the last tokens."""
    if window is None and _takes_3(qkv[0]):
        return _Attend3.apply(*qkv, sequences, scale)
    from torch.nn.attention.varlen import varlen_attn

    # torch's window counts the tokens before the query; (-1, 0) is causal without a window
    left = -1 if window is None else window - 1
    layout = (sequences.query_starts, sequences.key_starts, sequences.longest_query, sequences.longest_key)
    return varlen_attn(*qkv, *layout, scale=scale, window_size=(left, 0), **_gqa_option(*qkv[:2]))


def _takes_3(q: torch.Tensor) -> bool:
    """Whether vLLM's FlashAttention 3 takes `q`; False if vLLM is not loaded, since importing it takes seconds."""
    if "vllm" not in sys.modules:
        return False
    from qerl.engine.vllm import flash

    return flash.takes(q)


class _Attend3(torch.autograd.Function):
    """FlashAttention 3's forward pass, which saves for the backward pass what torch's own would."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float | None):
        from qerl.engine.vllm import flash

        out, sums = flash.forward((q, k, v), sequences, scale)
        ctx.sequences, ctx.scale = sequences, scale
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        sequences = ctx.sequences
        layout = (sequences.query_starts, sequences.key_starts, sequences.longest_query, sequences.longest_key)
        dropout, causal = 0.0, True
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *ctx.saved_tensors, *layout, dropout, causal, *_no_dropout(grad.device), scale=ctx.scale
        )
        return *grads, None, None


@cache
def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A random generator's state, which the backward pass takes but does not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, dtype=torch.uint64, device=device)


def _gqa_option(q: torch.Tensor, k: torch.Tensor) -> dict[str, bool]:
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] and _asks_for_gqa() else {}


@cache
def _asks_for_gqa() -> bool:
    """Whether varlen_attn has enable_gqa: torch 2.13 needs it for fewer kv heads, earlier versions do without."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
