"""When sequences or conversations outgrow the KV cache."""

import pytest

from qerl.engine.outgrown import outgrown


@pytest.mark.parametrize(
    ("lengths", "at_once", "cache", "said"),
    [
        ([10, 20, 30], 2, 50, None),  # the two longest fit
        ([10, 20, 30], 3, 59, "longest 3 sequences have 60"),
        ([30, 10, 20], 2, 49, "longest 2 sequences have 50"),
        ([40], 8, 39, "longest 1 sequences have 40"),
        ([], 8, 39, None),
    ],
)
def test_the_longest_that_run_at_once_are_what_counts(lengths, at_once, cache, said):
    found = outgrown(lengths, at_once, cache)
    assert (found is None) == (said is None)
    if found is not None:
        assert said in found[0] % found[1:]
