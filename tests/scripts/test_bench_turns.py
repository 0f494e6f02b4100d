"""scripts/bench/bench_turns.py: what it asks of an engine, and its ratio."""

from argparse import Namespace

import pytest
from bench_turns import FixedTurns, drawn, measure, summary

from qerl.engine.interface import Completion


class Counting:
    """An engine whose every turn has as many tokens as it may; it notes the lengths of prompts."""

    def __init__(self):
        self.prompts = []

    def run(self, conversations, seed):
        while requests := conversations.begin(wait=True, together=False):
            for request in requests:
                self.prompts.append(len(request.prompt))
                tokens = request.sampling.max_new_tokens
                conversations.finished(request.index, Completion([5] * tokens, [0.0] * tokens, "length"))


def test_each_turn_goes_on_from_all_before_it():
    engine, turns = Counting(), FixedTurns([[1] * 10, [2] * 10], turns=4, tokens=40, said=3, delay_s=0.001)
    engine.run(turns, 0)
    assert sorted(engine.prompts) == sorted(2 * [10, 23, 36, 49])
    assert turns.sampled == 80


def test_groups_share_their_prompt_and_the_ratio_is_by_token():
    engine = Counting()
    arguments = Namespace(prompt=10, sequences=4, group=2, tokens=8, said=3, delay=0.0)
    assert measure(engine, arguments, 4, 1)["tokens"] == 32
    assert drawn(3, 1) != drawn(3, 2)
    pairs = [({"seconds": 2.0, "tokens": 10}, {"seconds": 2.2, "tokens": 10})] * 2
    assert summary(pairs)["ratio"] == pytest.approx(1.1)
