"""The forward pass of FlashAttention 3 for training, from vLLM, which ships it for Hopper; torch has only version 2.

For a 7B model and 18 sequences in a row of 8448 tokens it takes 142 instead of 264 us per layer (development run,
H200). Importing this brings it to `qerl.model.packed_attention`; it stands here because only this package imports
vllm. Remove when torch's attention is as fast.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func
from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

from qerl.model.packed_attention import bring_forward_3_

HEAD_DIMS = (64, 128)


def takes(q: torch.Tensor) -> bool:
    """Whether `forward` takes queries of this dtype, head size and device."""
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return hopper and q.dtype == torch.bfloat16 and q.shape[-1] in HEAD_DIMS and is_fa_version_supported(3)


def forward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sequences: Any, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (T, heads, d) and the logarithm of the softmax's sums, float32 (heads, T).

    `qkv` is q (T, heads, d), then k and v (keys, kv heads, d). `sequences` is a `qerl.model.packing.Sequences`. If
    a sequence has fewer queries than keys, the queries are its last tokens.
    """
    return flash_attn_varlen_func(
        *qkv,
        max_seqlen_q=sequences.longest_query,
        cu_seqlens_q=sequences.query_starts,
        max_seqlen_k=sequences.longest_key,
        cu_seqlens_k=sequences.key_starts,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        fa_version=3,
    )


bring_forward_3_(sys.modules[__name__])
