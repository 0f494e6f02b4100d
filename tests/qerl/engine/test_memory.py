"""Memory of others is not counted as ours, the limit follows from the cap, and a rollout may outgrow the cache.

With `-m gpu` another process takes 3 GiB; the limit is computed for a card that is only described.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine import memory
from qerl.engine.memory import GIB, Cap, of_others, others_bytes, outgrown, own_bytes


@pytest.mark.parametrize(
    ("used", "reserved", "others"),
    [(0.5, 0, 0), (0.5 + 30, 0, 29.75), (0.5 + 30 + 4, 4, 29.75), (5.0, 4.9, 0), (0, 0, 0)],
)
def test_memory_that_is_neither_torchs_nor_a_contexts_belongs_to_others(used, reserved, others):
    assert of_others(int(used * GIB), int(reserved * GIB)) == int(others * GIB)


HOLD = """
import sys, torch
held = torch.ones(3 * 2**30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_memory_of_another_process_on_the_card_is_not_counted_as_ours():
    """Last run on an H200 on 2026-11-22."""
    torch.zeros(1, device="cuda")
    others_bytes.cache_clear()
    alone = own_bytes(0)
    others_bytes.cache_clear()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        beside = own_bytes(0)
        other.stdin.close()
    others_bytes.cache_clear()
    assert beside == pytest.approx(alone, abs=0.8 * GIB)  # the size of a context is not known more precisely


@pytest.fixture
def card(monkeypatch):
    """The limits that torch is given on a card of 80 GiB, 50 of them free; this process has 12, 9 of them in torch."""
    shares = []
    for name, answer in {
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "mem_get_info": lambda device: (50 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 9 * GIB,
        "set_per_process_memory_fraction": lambda share, device: shares.append(share),
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(memory, "own_bytes", lambda device: 12 * GIB)
    monkeypatch.setattr(memory, "others_bytes", lambda device: 18 * GIB)
    return shares


@pytest.mark.parametrize(
    ("own", "cap", "said"), [(69.5, 10.0, r"memory.cap_gib is 10.0 GiB.* 60.5 GiB more"), (12, 2.0, "")]
)
def test_a_cap_that_another_process_has_used_up_meanwhile_is_refused_with_what_to_do(card, monkeypatch, own, cap, said):
    """Seen on a card with several runs: what a 7B took counted as ours. The engine can still be closed."""
    monkeypatch.setattr(memory, "own_bytes", lambda device: int(own * GIB))
    limit = Cap(0, cap)
    with pytest.raises(EngineError, match=rf"{said}.*has taken memory meanwhile.*another card \(--gpu\)"):
        limit.count_outside_()
    limit.limit_()
    assert card == [cap / 80] * 2


def test_what_lies_outside_torch_is_taken_off_and_a_sleeping_cache_is_added(card):
    limit = Cap(0, 40.0)
    limit.count_outside_()
    limit.limit_(released=5 * GIB)
    limit.limit_()
    assert card == [40 / 80, 37 / 80, 42 / 80, 37 / 80]
    assert limit.is_set
    assert limit.free_bytes() == 28 * GIB


@pytest.mark.parametrize(("cap", "limits"), [(100.0, [1.0, 1.0]), (None, [])])
def test_a_cap_above_the_card_is_the_whole_card_and_without_one_nothing_is_limited(card, cap, limits):
    limit = Cap(0, cap)
    limit.count_outside_()
    assert limit.is_set is bool(limits)
    assert card == limits
    assert limit.free_bytes() == 50 * GIB


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
