"""The products in the backward pass of linear attention, in one launch, where fla-core refuses its own kernel.

On Hopper, Triton 3.4 to 3.7.0 transposes the result of a product wrongly where it becomes the first operand of another
(fla-org/flash-linear-attention#640). This kernel transposes none: it computes A^T as a product of its own.

For 16,384 tokens of 48 heads of 128 it moves 1.9 GB, for which an H200 needs 0.45 ms by calculation. It takes 1.3 ms
there, and 0.9 ms for 32 heads. Its test has the twin: autograd in float64 of what a chunk computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 64  # of keys that a program computes; of values that it reads at once


@triton.jit
def _products(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dv_ptr,
    h_ptr,
    dh_ptr,
    g_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    dg_ptr,
    starts_ptr,
    chunks_ptr,
    scale,
    tokens,
    SHARED: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence, number = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    first = tl.load(starts_ptr + sequence).to(tl.int64) + number.to(tl.int64) * SIZE
    count = tl.minimum(tl.load(starts_ptr + sequence + 1).to(tl.int64) - first, SIZE).to(tl.int32)
    heads: tl.constexpr = KEY_HEADS * SHARED
    row = tl.arange(0, SIZE)
    key = part * COLUMNS + tl.arange(0, COLUMNS)
    token, own, inside = first + row, row < count, key < KEY_DIM
    keyed = own[:, None] & inside[None, :]
    at_key = (token[:, None] * KEY_HEADS + key_head) * KEY_DIM + key[None, :]
    q = tl.load(q_ptr + at_key, mask=keyed, other=0.0)
    k = tl.load(k_ptr + at_key, mask=keyed, other=0.0)
    all_dq = tl.zeros((SIZE, COLUMNS), tl.float32)
    all_dk = tl.zeros((SIZE, COLUMNS), tl.float32)
    for head in range(key_head * SHARED, key_head * SHARED + SHARED):
        inner = tl.zeros((SIZE, SIZE), tl.float32)
        turned = tl.zeros((SIZE, SIZE), tl.float32)
        dq = tl.zeros((SIZE, COLUMNS), tl.float32)
        dk = tl.zeros((SIZE, COLUMNS), tl.float32)
        dw = tl.zeros((SIZE, COLUMNS), tl.float32)
        of_last = 0.0
        for begin in range(0, VALUE_DIM, COLUMNS):
            value = begin + tl.arange(0, COLUMNS)
            valued = own[:, None] & (value < VALUE_DIM)[None, :]
            at_value = (token[:, None] * heads + head) * VALUE_DIM + value[None, :]
            v = tl.load(v_ptr + at_value, mask=valued, other=0.0)
            do = tl.load(do_ptr + at_value, mask=valued, other=0.0)
            dv = tl.load(dv_ptr + at_value, mask=valued, other=0.0)
            at_state = ((chunk * heads + head) * KEY_DIM + key[None, :]) * VALUE_DIM + value[:, None]
            stated = (value < VALUE_DIM)[:, None] & inside[None, :]
            h = tl.load(h_ptr + at_state, mask=stated, other=0.0)
            dh = tl.load(dh_ptr + at_state, mask=stated, other=0.0)
            of_last += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
            inner = tl.dot(do, tl.trans(v), inner)
            turned = tl.dot(v, tl.trans(do), turned)
            dq = tl.dot(do, h.to(do.dtype), dq)
            dk = tl.dot(v, dh.to(v.dtype), dk)
            dw = tl.dot(dv, h.to(dv.dtype), dw)
        at_dw = (token[:, None] * heads + head) * KEY_DIM + key[None, :]
        tl.store(dw_ptr + at_dw, -dw.to(dw_ptr.dtype.element_ty), mask=keyed)
        g = tl.load(g_ptr + token * heads + head, mask=own, other=0.0)
        last = tl.load(g_ptr + (first + count - 1) * heads + head)
        decay = tl.exp2(g[:, None] - g[None, :])
        below = (row[:, None] >= row[None, :]) & own[:, None]
        inner = tl.where(below, inner * decay * scale, 0.0).to(q.dtype)
        decay = tl.exp2(g[None, :] - g[:, None])
        above = (row[:, None] <= row[None, :]) & own[None, :]
        turned = tl.where(above, turned * decay * scale, 0.0).to(q.dtype)
        dq *= (tl.exp2(g) * scale)[:, None]
        dk *= tl.where(own, tl.exp2(last - g), 0.0)[:, None]
        of_last = tl.exp2(last) * of_last + tl.sum(dk * k.to(tl.float32))
        dq = tl.dot(inner, k, dq)
        dk = tl.dot(turned, q, dk)
        dg = tl.sum(dq * q.to(tl.float32), 1) - tl.sum(dk * k.to(tl.float32), 1)
        dg = tl.where(row == count - 1, dg + of_last, dg)
        tl.store(dg_ptr + (part.to(tl.int64) * tokens + token) * heads + head, dg, mask=own)
        all_dq += dq
        all_dk += dk
    tl.store(dq_ptr + at_key, all_dq.to(dq_ptr.dtype.element_ty), mask=keyed)
    tl.store(dk_ptr + at_key, all_dk.to(dk_ptr.dtype.element_ty), mask=keyed)


def products_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk (1, T, H, K), dw (1, T, HV, K) and dg, float32 (1, T, HV), as fla-core's `chunk_bwd_dqkwg`.

    A chunk has the state h before it, the gradient dh of the state after it, and logarithms to base 2 of cumulative
    decays g. Its output is scale (2^g q h + A v), with A = q k^T 2^(g_i - g_j) on and below the diagonal, and the state
    after it 2^(g_last) h + (2^(g_last - g) k)^T v. There v stands for u - w h, and dv is its gradient. q and k are
    (1, T, H, K), v, do and dv (1, T, HV, V), h and dh (1, chunks, HV, K, V), and chunk_indices (chunks, 2) has each
    chunk's sequence and its number there. dg is the gradient of g ln 2, not yet summed over later tokens.
    """
    assert not state_v_first, "the gated delta rule of packed rows keeps its states by key dimension"
    tokens, heads, key_dim = q.shape[1:]
    values, value_dim = v.shape[2:]
    parts = triton.cdiv(key_dim, COLUMNS)
    dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    dg = g.new_empty(parts, tokens, values)
    _products[(len(chunk_indices), heads, parts)](
        *(q, k, v, do, dv, h, dh, g),
        *(dq, dk, dw, dg, cu_seqlens, chunk_indices),
        key_dim**-0.5 if scale is None else scale,
        tokens,
        SHARED=values // heads,
        KEY_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=chunk_size,
        COLUMNS=COLUMNS,
        num_warps=8,
        num_stages=3,
    )
    return dq, dk, dw, dg.sum(0, keepdim=True)
