"""The draw of a token a row in plain torch: twin of `draw_kernel.draw`, number for number, so that tokens agree.

Gumbel-max: the largest of z + g is a draw from softmax(z), with g = -log(-log(1 - u)) and u uniform. The u are words of
Philox4x32-10 (Salmon et al., SC 2011): the first word by the request's seed and the token's position is the row's key,
and the four words of one counter are for four logits, a quarter of a block apart. torch 2.11 gives Philox on CUDA alone
and no way to count on by oneself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 4096  # logits of a program
QUARTER = BLOCK // 4
WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
SMALLEST = 4.6566127342e-10  # u: the kernel's 2^-31, as it writes it


class Words(NamedTuple):
    """Four 32-bit words each, int64 of 0...2^32 - 1."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor
    fourth: torch.Tensor


def reference_draw(
    logits: torch.Tensor,
    request: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token (n,) int64, its logprob (n,) float32) for each row of `logits` (n, vocabulary).

    `request` (n,) indexes `temperature` (float32) and `seeds` (int64); `positions` (n,) int64. The logprob is of
    softmax(logits / temperature); at temperature 0 the token is the first of the largest logits and the logprob that of
    softmax(logits).
    """
    temperature, key = temperature[request], row_keys(seeds[request], positions)
    scaled = logits.double() / torch.where(temperature == 0.0, 1.0, temperature).double()[:, None]
    noise = gumbel(key, logits.shape[1]).masked_fill_(temperature[:, None] == 0.0, 0.0)
    tokens = (scaled + noise).argmax(1)
    return tokens, scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0].float()


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key (n,) of each row's noise, 32 bits in int64."""
    nothing = torch.zeros_like(positions)
    counter = Words(positions & WORD, (positions >> 32) & WORD, nothing, nothing)
    return philox(counter, (seeds & WORD, (seeds >> 32) & WORD)).first


def gumbel(key: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise (n, vocabulary), float64 of a float32 u, by the rows' keys (n,)."""
    blocks = -(-vocabulary // BLOCK)
    lanes = torch.arange(blocks * QUARTER, device=key.device)[None, :].expand(len(key), -1)
    nothing = torch.zeros_like(lanes)
    words = philox(Words(lanes, nothing, nothing, nothing), (key[:, None], torch.zeros_like(key)[:, None]))
    bits = torch.stack(words, 1).unflatten(2, (blocks, QUARTER)).transpose(1, 2).flatten(1)[:, :vocabulary]
    positive = torch.where(bits > WORD // 2, WORD - bits, bits)  # of a signed word: itself, or what lies as far below 0
    uniform = (positive.float() * SMALLEST).clamp(min=SMALLEST).double()
    return -torch.log(-torch.log1p(-uniform))


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 of counters and keys whose words broadcast, as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 64 bits; that the highest is a sign changes no bit
        c0, c1 = (high >> 32) & WORD ^ c1 ^ k0, high & WORD
        c2, c3 = (low >> 32) & WORD ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return Words(c0, c1, c2, c3)
