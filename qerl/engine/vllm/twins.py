"""The kernels of `kernels.py` in plain torch.

`reference_draw` uses the random numbers of `kernels.draw`. It uses the Gumbel-max trick twice: the largest of z + g
is a draw from softmax(z), where g = -log(-log(1 - u)) and u is uniform. It draws a block of logits by the logs of the
blocks' sums, and then a token of the block. The u are words of Philox (`qerl/base/philox.py`). The first two words for
the request's seed and the token's position are the keys of the noise in the block and on the blocks; the four words of
one counter are for four logits, a quarter of a block apart.

Rows of the functions on experts are pairs: row p belongs to token p // k and its choice p % k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qerl.base.philox import WORD, Words, philox
from qerl.model.decode_attention import rotated

BLOCK = 4096  # logits per program
QUARTER = BLOCK // 4
SMALLEST = 4.6566127342e-10  # the smallest u: 2^-31, with the digits that the kernel has


def reference_draw(
    logits: torch.Tensor,
    request: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token (n,) int64 and its logprob (n,) float32 for each row of `logits` (n, vocabulary).

    `request` (n,) indexes `temperature` (float32) and `seeds` (int64); `positions` is (n,) int64. The logprob is
    log softmax(logits / temperature) at the token. At temperature 0 the token is the first with the largest logit, and
    the logprob is log softmax(logits).
    """
    temperature, keys = temperature[request], row_keys(seeds[request], positions)
    greedy, which = temperature == 0.0, torch.arange(len(logits), device=logits.device)
    scaled = logits.double() / torch.where(greedy, 1.0, temperature).double()[:, None]
    blocks = F.pad(scaled, (0, -scaled.shape[1] % BLOCK), value=float("-inf")).unflatten(1, (-1, BLOCK))
    noisy = blocks.logsumexp(2) + gumbel(keys.second, blocks.shape[1])
    block = torch.where(greedy[:, None], blocks.amax(2), noisy).argmax(1)
    noise = gumbel(keys.first, BLOCK).masked_fill_(greedy[:, None], 0.0)
    tokens = block * BLOCK + (blocks[which, block] + noise).argmax(1)
    return tokens, scaled.log_softmax(1)[which, tokens].float()


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> Words:
    """The keys (n,) of each row's noise, 32 bits each: the first two words are used."""
    nothing = torch.zeros_like(positions)
    counter = Words(positions & WORD, (positions >> 32) & WORD, nothing, nothing)
    return philox(counter, (seeds & WORD, (seeds >> 32) & WORD))


def gumbel(key: torch.Tensor, count: int) -> torch.Tensor:
    """Standard Gumbel noise (n, count), at most a block, for keys (n,), computed in float64 from a float32 u."""
    lanes = torch.arange(QUARTER, device=key.device)[None, :].expand(len(key), -1)
    nothing = torch.zeros_like(lanes)
    words = philox(Words(lanes, nothing, nothing, nothing), (key[:, None], torch.zeros_like(key)[:, None]))
    bits = torch.cat(words, 1)[:, :count]
    positive = torch.where(bits > WORD // 2, WORD - bits, bits)  # read as a signed word s: s, or -1 - s if negative
    uniform = (positive.float() * SMALLEST).clamp(min=SMALLEST).double()
    return -torch.log(-torch.log1p(-uniform))


def shrink(x: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A x of each pair's expert, (pairs, R), for x (tokens or pairs, n), a (experts, R, n) and ids (tokens, k)."""
    rows = x if len(x) == ids.numel() else x.repeat_interleave(ids.shape[1], 0)
    return torch.bmm(a[ids.flatten()].float(), rows.float()[:, :, None])[:, :, 0].to(x.dtype)


def activate(inner: torch.Tensor, h: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (pairs, width) for inner (pairs, 2 width) + B h, with h (tokens or pairs, R) and b (experts, 2
    width, R). The sum is rounded before the activation, as in the trainer."""
    rows = h if len(h) == ids.numel() else h.repeat_interleave(ids.shape[1], 0)
    added = torch.bmm(b[ids.flatten()].float(), rows.float()[:, :, None])[:, :, 0]
    gate, up = (inner.float() + added).to(inner.dtype).float().chunk(2, -1)
    return (F.silu(gate) * up).to(inner.dtype)


def expand_(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """y (pairs, hidden) += w B h in place, with h (pairs, R), b (experts, hidden, R) and weights w (tokens, k)."""
    added = torch.bmm(b[ids.flatten()].float(), h.float()[:, :, None])[:, :, 0]
    return y.copy_(y.float() + weights.flatten()[:, None] * added)


def combine(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(tokens, hidden): the sum of each token's rows of y (pairs, hidden), and B times its weighted sum of h (pairs, R)
    for b (hidden, R)."""
    tokens, k = weights.shape
    hidden = (h.float().view(tokens, k, -1) * weights[:, :, None]).sum(1).to(h.dtype)
    return (y.float().view(tokens, k, -1).sum(1) + hidden.float() @ b.float().t()).to(y.dtype)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gain * wide / sqrt(mean(wide^2) + eps) in x's dtype, wide = x + residual in float32, or None without residual).

    The mean is over the last dimension. `residual` has x's shape, and `gain` is float32, one number per column.
    """
    wide = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * gain).to(x.dtype), None if residual is None else wide


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (tokens, columns), for x (tokens, 2 * columns) with gate before up; rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def rotate_(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor, head_dim: int) -> None:
    """Rotate the heads of q and k (tokens, heads * head_dim) in place.

    `positions` (tokens,) int64 says which row of `angles` (positions, 2 * half: cosines, then sines) a token has. The
    first `half` columns of a head are rotated with the second, and any others stay.
    """
    of_rows = angles[positions][:, None]
    for rows in (q, k):
        heads = rows.unflatten(1, (-1, head_dim))[..., : angles.shape[1]]
        heads.copy_(rotated(heads, of_rows))
