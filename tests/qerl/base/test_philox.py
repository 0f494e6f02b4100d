"""The random words against the published ones."""

import pytest
import torch

from qerl.base.philox import WORD, Words, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_the_random_words_are_those_of_philox(counter, key, words):
    """The known answers of Random123, the library of its authors (kat_vectors, philox4x32 10)."""
    given = Words(*(torch.tensor([word]) for word in counter))
    assert [word.item() for word in philox(given, tuple(torch.tensor([word]) for word in key))] == words
