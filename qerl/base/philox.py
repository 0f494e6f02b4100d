"""Seeds, and Philox4x32-10 (Salmon et al., SC 2011) in plain torch: words that follow from a counter and a key.

The Triton kernels draw the same words by `tl.randint4x`. We compute Philox ourselves because torch 2.11 has it only on
CUDA, and does not let one choose the counter.
"""

import hashlib
from typing import NamedTuple

import torch

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 63-bit seed for one purpose at one step, so that no two uses share a stream."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def permutation(count: int, seed: int, step: int, purpose: str) -> torch.Tensor:
    """The numbers below `count` (int64) in a random order, for one purpose at one step."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, step, purpose)))


class Words(NamedTuple):
    """Four tensors of 32-bit words, as int64 from 0 to 2^32 - 1."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor
    fourth: torch.Tensor


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """The words of a counter and a key, whose own words are int64 as well; they are broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 64 bits; it does not matter that int64 has a sign
        c0, c1 = (high >> 32) & WORD ^ c1 ^ k0, high & WORD
        c2, c3 = (low >> 32) & WORD ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return Words(c0, c1, c2, c3)
