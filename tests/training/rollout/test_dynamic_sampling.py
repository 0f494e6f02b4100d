"""Dynamic sampling: which groups are kept and which prompts are added, until the batch is full."""

import logging

import pytest
import torch

from training.loss.groups import GradedGroup, Group, Prompt, Sample, informative_groups
from training.rollout.dynamic_sampling import (
    MAX_EXTRA_ROLLOUTS,
    extra_order,
    extra_prompts,
    fill_batch,
    keep,
    next_rows,
)


def group(row, informative, tokens=3):
    sample = Sample([1] * tokens, [-0.5] * tokens, [True] * tokens, False)
    reward = torch.tensor([float(informative)])
    return GradedGroup(Group(Prompt(row, [1], "", None), (sample,)), ("",), reward[None], reward, informative)


REWARDS = (  # rewards of a group, which of its completions are in the loss, whether it is informative
    ([1.0, 0.0, 0.0], [1, 1, 1], True),
    ([0.0, 0.0, 0.0], [1, 1, 1], False),
    ([1.0, 1.0, 1.0], [1, 1, 1], False),
    ([-1e-9, 0.0, 0.0], [1, 1, 1], False),  # rounding
    ([1000.0, 1000.00006, 1000.0], [1, 1, 1], False),  # the next float32 number: rounding at that size
    ([0.0, 0.0, 0.01], [1, 1, 1], True),
    ([1.0, 0.0, 0.0], [0, 0, 1], True),  # the completion in the loss has an advantage compared with the others
    ([1.0, 0.0, 0.0], [0, 0, 0], False),  # all are truncated and masked, so none is trained on
)


@pytest.mark.parametrize(("rewards", "in_loss", "expected"), REWARDS)
def test_groups_with_a_gradient_are_informative(rewards, in_loss, expected):
    assert informative_groups(torch.tensor([rewards]), torch.tensor([in_loss]).bool()) == [expected]


KEPT = (
    ([True, True], 2, [0, 1]),
    ([True, False, True], 2, [0, 2]),
    ([False, True, True, True], 2, [1, 2]),  # a surplus goes in the order drawn
    ([False, True, False, False], 3, [0, 1, 2]),  # filled up with the first groups without a signal
    ([False, False, False, True], 2, [0, 3]),
)


@pytest.mark.parametrize(("informative", "size", "expected"), KEPT)
def test_which_groups_are_kept(informative, size, expected):
    assert keep(informative, size) == expected


COUNTS = (  # informative so far, batch, prompts: ceil(1.5 * missing * (sampled + 2) / (informative + 1)), bounded
    ([True] * 8, 8, 0),
    ([True] * 9, 8, 0),
    ([True] * 7 + [False], 8, 2),  # 1.5 * 1 * 10 / 8 = 1.9
    ([True] * 4 + [False] * 4, 8, 12),  # 1.5 * 4 * 10 / 5
    ([False] * 8, 8, 16),  # at most twice the batch
    ([False] * 32, 32, 64),
    ([False], 1, 5),  # 1.5 * 1 * 3 / 1 = 4.5
    ([False] * 20, 1, 16),  # 33, but at most 16 for a small batch
)


@pytest.mark.parametrize(("informative", "size", "expected"), COUNTS)
def test_the_number_of_prompts_of_an_extra_rollout(informative, size, expected):
    assert extra_prompts(informative, size) == expected


def test_extra_prompts_are_those_drawn_least_often_among_those_not_kept():
    assert next_rows([3, 1, 4, 0, 2], drawn=[1, 2], kept={2}, count=2) == [3, 4]
    assert next_rows([3, 1, 4, 0, 2], drawn=[1, 2], kept={2}, count=9) == [3, 4, 0, 1]  # all but the kept one
    assert next_rows([0, 1], drawn=[0, 1, 1], kept=set(), count=2) == [0, 1]


def test_extra_prompts_depend_only_on_seed_and_step():
    assert extra_order(50, 0, 3) == extra_order(50, 0, 3)
    assert sorted(extra_order(50, 0, 3)) == list(range(50))
    assert len({tuple(extra_order(50, seed, step)) for seed in (0, 1) for step in (0, 1)}) == 4


@pytest.mark.parametrize("size", [1, 2, 8, 16, 32])
def test_with_one_informative_group_in_four_every_batch_is_filled(size):
    """All groups of every step have a signal, at a cost close to the minimum of 4 sampled groups for each."""
    torch.manual_seed(size)
    steps, sampled = 400, 0
    for step in range(steps):
        batch = fill_batch(
            lambda rows: [group(row, torch.rand(()).item() < 0.25) for row in rows],
            list(range(size)),
            extra_order(1000, 0, step),
            MAX_EXTRA_ROLLOUTS,
        )
        assert [member.informative for member in batch.kept] == [True] * size
        assert len({member.group.prompt.row for member in batch.kept}) == size
        sampled += len(batch.sampled)
    assert sampled / (steps * size) < (5 if size >= 8 else 8)


def test_groups_missing_at_the_bound_are_filled_up_with_a_warning(caplog):
    signal = {0, 7}
    drawn = []

    def draw(rows):
        drawn.append(rows)
        return [group(row, row in signal, tokens=row + 1) for row in rows]

    with caplog.at_level(logging.WARNING):
        batch = fill_batch(draw, [0, 1, 2], [5, 6, 7, 8, 9, 1, 0, 2, 3, 4], 1)
    # 1 of 3 had a signal: 1.5 * 2 * 5 / 2 = 7.5 prompts. None comes twice, so row 1 is drawn again last.
    assert drawn == [[0, 1, 2], [5, 6, 7, 8, 9, 3, 4, 1]]
    assert [member.group.prompt.row for member in batch.kept] == [0, 1, 7]
    metrics = batch.metrics()
    assert metrics.pop("time/extra_rollouts_s") > 0
    assert metrics == {
        "dynamic_sampling/extra_rollouts": 1,
        "dynamic_sampling/sampled_groups": 11,
        "dynamic_sampling/informative_share": 2 / 11,
        "dynamic_sampling/discarded_groups": 8,
        "dynamic_sampling/discarded_tokens": 3 + (6 + 7 + 9 + 10 + 4 + 5 + 2),
        "dynamic_sampling/filled_groups": 1,
    }
    assert "1 of 3 groups have no signal after 1 extra rollouts (2 of 11 sampled ones had one)" in caplog.text


def test_a_batch_that_is_full_at_once_needs_no_extra_rollout():
    batch = fill_batch(lambda rows: [group(row, True) for row in rows], [4, 2], [0, 1, 2, 3, 4], MAX_EXTRA_ROLLOUTS)
    assert [member.group.prompt.row for member in batch.kept] == [4, 2]
    assert (batch.extra_rollouts, len(batch.sampled)) == (0, 2)
