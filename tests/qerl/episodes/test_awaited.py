"""Coroutines of several episodes at once, each awaited in a thread of its own."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl.episodes import driven as module
from qerl.episodes.driven import awaited


def together(*coroutines):
    """What they end with, awaited at the same time."""
    with ThreadPoolExecutor(len(coroutines)) as threads:
        return list(threads.map(awaited, coroutines))


def test_what_is_no_coroutine_stays_as_it_is():
    assert awaited(3) == 3
    assert awaited(None) is None


def test_episodes_share_what_belongs_to_one_event_loop():
    lock, inside = asyncio.Lock(), []

    async def alone(name):
        async with lock:
            inside.append(name)
            await asyncio.sleep(0.02)
            assert inside.pop() == name
        return name

    assert together(alone("a"), alone("b"), alone("c")) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), asyncio.CancelledError()])
def test_what_a_coroutine_raises_reaches_its_caller_alone(error):
    async def fails():
        raise error

    async def works():
        return 1

    with pytest.raises(type(error)):
        awaited(fails())
    assert awaited(works()) == 1


def test_a_coroutine_that_blocks_does_not_hold_the_others(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    began = time.monotonic()

    async def blocks(seconds):
        time.sleep(seconds)
        return seconds

    assert together(blocks(0.6), blocks(0.61), blocks(0.62)) == [0.6, 0.61, 0.62]
    assert time.monotonic() - began < 1.5  # one after another they take 1.8 s
