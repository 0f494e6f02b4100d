"""Prompts are asked in one way: places of ranks, seeds of episodes, and what an episode's completion is."""

from types import SimpleNamespace

import pytest

from qerl.data.tasks import Example
from qerl.engine.interface import Completion, SamplingParams
from qerl.episodes.driven import Episode, Turn
from training.loss.groups import Prompt, Sample
from training.rollout.sampler import Asking

SAMPLING = SamplingParams(8, 1.0)


def prompt(row):
    return Prompt(row, [row, 1], f"text {row}", Example(f"q{row}", "a", str(row)))


class Engine:
    """Answers each prompt with its first token, and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def generate(self, *given):
        self.calls.append(given)
        return [Completion([ids[0]], [-1.0], "stop") for ids in given[0]]


@pytest.mark.parametrize(("size", "first"), [(1, 0), (1, 3), (2, 3)])
def test_the_completions_of_a_prompt_stand_together_at_their_places_among_all_ranks(size, first):
    engine, told = Engine(), lambda *_: None
    groups = Asking(SAMPLING, size).groups(engine, [prompt(4), prompt(7)], 5, first, told)
    assert [(group.prompt.row, [list(each.token_ids) for each in group.samples]) for group in groups] == [
        (4, [[4]] * size),
        (7, [[7]] * size),
    ]
    assert Asking(SAMPLING).groups(engine, [], 5) == []  # for which it is not called
    assert engine.calls == [([[4, 1]] * size + [[7, 1]] * size, SAMPLING, 5, told, first * size)]


@pytest.mark.parametrize("own", [None, lambda seed, row: 100 * seed + row])
def test_episodes_of_one_row_begin_alike(own):
    def play(engine, starts, sampling, seed, told):
        seeds.extend(starts)
        return [Episode(*([()] * 5), "", 0.0, "done", False, None, 0, 0, 0, 0.0) for _ in starts]

    seeds = []
    environments = SimpleNamespace(play=play, start=lambda example, messages, ids, seed: seed)
    given = {} if own is None else {"environment_seed": own}
    Asking(SAMPLING, 2, environments, **given).groups("engine", [prompt(4), prompt(7)], 5)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert own is None or seeds == [504, 504, 507, 507]


@pytest.mark.parametrize("truncated", [False, True])
def test_of_an_episode_what_the_model_wrote_in_all_turns_counts(truncated):
    turns = (Turn("assistant", "a", 1), Turn("user", "no", 2), Turn("assistant", "b", 1))
    written, logprobs = [True, False, False, True], [-1.0, 0.0, 0.0, -2.0]
    episode = Episode([9], [5, 6, 7, 8], logprobs, written, turns, "b", 0.5, "turns", truncated, None, 0, 0, 0, 0.0)
    sample = Sample.of_episode(episode)
    assert (sample.written, sample.truncated) == (2, truncated)
