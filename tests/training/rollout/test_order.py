"""The shares of several sources in each rollout, and the order of their rows."""

from itertools import islice

import pytest

from training.rollout.prompts import Walk, mixed_rows, most_per_rollout, rollout_rows, shares


def counts(weights, prompts, rollouts):
    return [
        [taken.count(source) for source in range(len(weights))] for taken in islice(shares(weights, prompts), rollouts)
    ]


def test_each_rollout_has_the_largest_remainders_and_what_is_left_is_carried_over():
    # 16 prompts by 3 : 1 : 1 are 9.6, 3.2 and 3.2. The carried remainders are worked out by hand.
    assert counts([3, 1, 1], 16, 5) == [[10, 3, 3], [9, 4, 3], [10, 3, 3], [9, 3, 4], [10, 3, 3]]


@pytest.mark.parametrize(("weights", "prompts"), [([0.9, 0.05, 0.05], 4), ([1, 1, 1], 1), ([0.1, 0.2, 0.7], 7)])
def test_shares_never_stray_from_the_weights_by_more_than_one_prompt(weights, prompts):
    total = [0] * len(weights)
    for rollout, each in enumerate(counts(weights, prompts, 200), start=1):
        assert sum(each) == prompts
        total = [before + new for before, new in zip(total, each, strict=True)]
        due = [rollout * prompts * weight / sum(weights) for weight in weights]
        assert max(abs(one - other) for one, other in zip(total, due, strict=True)) <= 1


def test_the_most_that_a_rollout_takes_of_each_source():
    assert most_per_rollout([3, 1, 1], 16, 2) == [10, 4, 3]
    assert most_per_rollout([3, 1, 1], 16, 5) == [10, 4, 4]
    assert most_per_rollout([1.0], 16, 10**9) == [16]


@pytest.mark.parametrize(("rows", "count"), [(7, 3), (5, 3), (8, 8), (4, 3)])
def test_a_walk_of_one_source_is_the_order_of_a_run_without_sources(rows, count):
    walk = Walk(rows, 1, "data")
    assert [walk.take(count)[0] for _ in range(3 * rows)] == [rollout_rows(rows, count, 1, r) for r in range(3 * rows)]


def test_rows_of_each_source_come_once_per_epoch_and_never_twice_in_a_rollout():
    rows = [range(5), range(5, 12)]
    rollouts = list(islice(mixed_rows([("a", 2), ("b", 1)], rows, 5, 0), 42))
    assert [taken for taken in rollouts if len(set(taken)) < 5] == []
    for own in rows:
        picked = [row for taken in rollouts for row in taken if row in own]
        for epoch in range(len(picked) // len(own)):
            assert sorted(picked[epoch * len(own) : (epoch + 1) * len(own)]) == list(own)


def test_the_rows_of_a_source_do_not_depend_on_the_others():
    one = [
        row for taken in islice(mixed_rows([("a", 1), ("b", 1)], [range(9), range(9, 20)], 4, 0), 8) for row in taken
    ]
    two = [
        row for taken in islice(mixed_rows([("c", 3), ("a", 1)], [range(30, 90), range(9)], 4, 0), 16) for row in taken
    ]
    assert [row for row in one if row < 9] == [row for row in two if row < 9]
