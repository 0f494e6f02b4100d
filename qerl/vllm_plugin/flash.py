"""The forward pass of FlashAttention 3 that vLLM ships for Hopper, for training: torch has FlashAttention 2 alone.

7B, 18 sequences in a row of 8448 tokens: 142 instead of 264 us a layer (development run, H200). Remove when
torch's is as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func
from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

HEAD_DIMS = (64, 128)


def takes(q: torch.Tensor) -> bool:
    """Whether `forward` takes queries of this dtype, head size and device."""
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return hopper and q.dtype == torch.bfloat16 and q.shape[-1] in HEAD_DIMS and is_fa_version_supported(3)


def forward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sequences: Any, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (T, heads, d) and the logarithm of the softmax's sums, float32 (heads, T), of q (T, heads, d) and k, v
    (keys, kv heads, d). `sequences`: `training.policy.packing.Sequences`; queries fewer than their keys are the last of
    them.
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
