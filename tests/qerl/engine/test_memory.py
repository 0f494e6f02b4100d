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


def test_a_cap_that_another_process_has_used_up_meanwhile_is_refused_with_what_to_do(card, monkeypatch):
    """Seen on a card with several runs: what a 7B took counted as ours, and the cap was 10 GiB."""
    monkeypatch.setattr(memory, "own_bytes", lambda device: int(69.5 * GIB))
    with pytest.raises(EngineError, match=r"memory.cap_gib is 10.0 GiB.* 60.5 GiB more.*another card \(--gpu\)"):
        Cap(0, 10.0).count_outside_()


def test_what_lies_outside_torch_is_taken_off_and_a_sleeping_cache_is_added(card):
    limit = Cap(0, 40.0)
    limit.count_outside_()
    limit.limit_(released=5 * GIB)
    limit.limit_()
    assert card == [40 / 80, 37 / 80, 42 / 80, 37 / 80]
    assert limit.is_set
    assert limit.free_bytes() == 28 * GIB


def test_when_another_process_took_the_cap_the_engine_can_still_be_closed(card):
    limit = Cap(0, 2.0)
    with pytest.raises(EngineError, match="another process has taken memory meanwhile"):
        limit.count_outside_()
    limit.limit_()
    assert card == [2 / 80, 2 / 80]


def test_a_cap_above_the_card_is_the_whole_card(card):
    assert Cap(0, 100.0).free_bytes() == 50 * GIB
    assert card == [1.0]


def test_without_a_cap_nothing_is_limited(card):
    limit = Cap(0, None)
    limit.count_outside_()
    limit.limit_()
    assert not limit.is_set
    assert card == []
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
