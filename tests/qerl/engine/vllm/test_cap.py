"""The limit of torch's allocator that follows from a cap, on a card that is only described."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.vllm import cap
from qerl.engine.vllm.cap import Cap

GIB = 2**30


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
    monkeypatch.setattr(cap, "own_bytes", lambda device: 12 * GIB)
    monkeypatch.setattr(cap, "others_bytes", lambda device: 18 * GIB)
    return shares


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
