"""Memory of other processes is not counted as ours, nor ours as theirs. With `-m gpu` another process takes 3 GiB."""

import subprocess
import sys

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.own_memory import GIB, check_beside_cap, of_others, others_bytes, own_bytes


@pytest.mark.parametrize(
    ("used", "reserved", "others"),
    [(0.5, 0, 0), (0.5 + 30, 0, 29.75), (0.5 + 30 + 4, 4, 29.75), (5.0, 4.9, 0), (0, 0, 0)],
)
def test_memory_that_is_neither_torchs_nor_a_contexts_belongs_to_others(used, reserved, others):
    assert of_others(int(used * GIB), int(reserved * GIB)) == int(others * GIB)


def test_a_cap_that_another_process_has_used_up_meanwhile_is_refused_with_what_to_do():
    """Seen on a card with several runs: what a 7B took counted as ours, and the cap was 10 GiB."""
    check_beside_cap(3 * GIB, 10 * GIB)
    with pytest.raises(EngineError, match=r"memory.cap_gib is 10.0 GiB.* 60.5 GiB more.*another card \(--gpu\)"):
        check_beside_cap(int(60.5 * GIB), 10 * GIB)


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
