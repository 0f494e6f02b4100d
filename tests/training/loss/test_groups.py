"""Groups of a step: their metrics and lengths by hand, and no advantage where all rewards are equal."""

import math

import pytest
import torch

from training.loss.groups import (
    GradedGroup,
    Group,
    Prompt,
    Sample,
    group_advantages,
    group_metrics,
    length_metrics,
    logged_means,
    rewards_differ,
)
from training.rewards.grading import Grader, merged_grades
from training.rewards.rewards import Rewards

NAMES = ("digits", "accuracy")


def graded(accuracy, digits, tokens=(1, 1), truncated=(False, False)):
    """A group of two completions with these rewards, lengths and ends; the total is the sum of its rewards."""
    rewards_G_F = torch.tensor([digits, accuracy]).T
    samples = [Sample([5] * n, [-1.0] * n, [True] * n, cut) for n, cut in zip(tokens, truncated, strict=True)]
    group = Group(Prompt(0, [3], "a", None), tuple(samples))
    return GradedGroup(group, ("", ""), rewards_G_F, rewards_G_F.nansum(1), True)


def test_groups_that_are_all_right_or_all_wrong_are_told_apart():
    """A grade of a half counts as right, as in evaluation. A group of another source has no accuracy."""
    nan = math.nan
    groups = [
        graded([1.0, 0.5], [0.0, 0.5]),
        graded([0.0, 0.4], [0.0, 0.0]),
        graded([0.0, 1.0], [1.0, 0.0]),
        graded([0.0, 1.0], [3.0, 0.0]),
        graded([nan, nan], [1.0, 1.0]),
    ]
    found = group_metrics(groups, NAMES)
    assert found["groups/all_right_share"] == found["groups/all_wrong_share"] == 1 / 4
    assert found["groups/reward_std"] == pytest.approx((0.4 + 2) / math.sqrt(2) / 5)


@pytest.mark.parametrize("names", [("digits", "other"), NAMES])
def test_without_an_accuracy_no_group_is_called_right_or_wrong(names):
    value = 1.0 if "accuracy" not in names else math.nan
    assert set(group_metrics([graded([value, value], [0.0, 1.0])], names)) == {"groups/reward_std"}


def test_lengths_of_completions_that_ended_leave_out_those_that_hit_the_limit():
    groups = [graded([0.0, 0.0], [0.0, 0.0], (2, 8), (False, True)), graded([0.0, 0.0], [0.0, 0.0], (4, 8))]
    found = length_metrics(groups)
    assert found["completions/mean_tokens"] == 22 / 4
    assert found["completions/mean_ended_tokens"] == pytest.approx(14 / 3)
    all_cut = length_metrics([graded([0.0, 0.0], [0.0, 0.0], (8, 8), (True, True))])
    assert "completions/mean_ended_tokens" not in all_cut


def words(completions, log_metric, **columns):
    """Logs its share of long completions, and their lengths one by one."""
    lengths = [len(text) for text in completions]
    log_metric("own/long_share", sum(length > 1 for length in lengths) / len(lengths))
    for length in lengths:
        log_metric("own/mean", length)
    return [0.0] * len(completions)


words.waits = False


def of_lengths(source, *lengths):
    """A group of a source with completions of these lengths."""
    samples = (Sample([5] * length, [-1.0] * length, [True] * length, False) for length in lengths)
    return Group(Prompt(0, [3], "a", None, source=source), tuple(samples))


def test_what_rewards_log_weighs_as_many_completions_as_the_call_had():
    """Each source is a call of its own on each rank and in each rollout: here of 1, 3, 2 and 1 completions."""
    rewards = Rewards([words, words], [1.0, 1.0], (0, 1), ("first", "second"))
    grader = Grader(rewards, lambda ids: ["x" * len(each) for each in ids], mask_truncated=False)
    rank = grader.grade([of_lengths(0, 1), of_lengths(1, 1, 2, 3)], step=1, steps_done=0)
    other_rank = grader.grade([of_lengths(0, 4, 8)], step=1, steps_done=0)
    extra_rollout = grader.grade([of_lengths(0, 1)], step=1, steps_done=0)
    found = logged_means(merged_grades([merged_grades([rank, other_rank]), extra_rollout]).logged)
    assert found == pytest.approx({"own/long_share": 4 / 7, "own/mean": 20 / 7})


# --- equal rewards
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.7] * 8, False),
        ([0.3, 0.3 + 6e-8], False),  # sums of weighted rewards may differ by this
        ([1e4 + 1e-3, 1e4], False),
        ([0.0, 0.0], False),
        ([0.7, 0.70001], True),
        ([0.0, 1e-5], True),
        ([-1.0, 1.0], True),
    ],
)
def test_rounding_is_told_from_a_real_difference(rewards, expected):
    assert rewards_differ(torch.tensor([rewards])).tolist() == [expected]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_do_not_train(scale):
    """The float32 mean of eight rewards of 0.7 is not 0.7, and Adam turns any gradient into a full step."""
    rewards = torch.tensor([[0.7] * 8, [0.0, 1.0] * 4])
    advantages, equal_share = group_advantages(rewards, scale)
    assert equal_share == 0.5
    assert (advantages[0] == 0).all()
    assert (advantages[1] != 0).all()
