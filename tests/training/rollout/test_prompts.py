"""Which prompts a step trains on, by seed and rollout alone, and the shares and rows of several sources."""

from itertools import islice

import pytest

from qerl.base.errors import DataError
from qerl.checkpoint.load import load_tokenizer
from qerl.config.schema import DataConfig
from qerl.data.tasks import build_messages, render_prompt
from tests.helpers.bases import TINY
from training.loss.groups import Prompt
from training.rollout.prompts import StepPrompts, Walk, load_prompts, mixed_rows, most_per_rollout, rollout_rows, shares


def step_prompts(rows=7, **changes):
    prompts = [Prompt(row, [row], str(row), None) for row in range(rows)]
    return StepPrompts(**({"prompts": prompts, "per_rollout": 3, "updates": 2, "rollouts": 10, "seed": 1} | changes))


def rows_of(steps):
    return [[prompt.row for prompt in step] for step in steps]


@pytest.mark.parametrize(("rows", "per_step"), [(4, 3), (7, 3), (9, 8), (17, 8), (100, 32)])
def test_no_step_has_a_row_twice_at_the_end_of_an_epoch(rows, per_step):
    for seed in range(5):
        steps = [rollout_rows(rows, per_step, seed, rollout) for rollout in range(rows * 3)]
        assert [step for step in steps if len(set(step)) < per_step] == []
        picked = [row for step in steps for row in step]
        for epoch in range(3 * per_step):
            assert sorted(picked[rows * epoch : rows * (epoch + 1)]) == list(range(rows))
    assert len({tuple(rollout_rows(100, 3, seed, 0)) for seed in range(5)}) == 5


@pytest.mark.parametrize("first", [1, 4, 9])
def test_a_later_start_gets_the_prompts_of_the_whole_run(first):
    assert rows_of(step_prompts(first=first)) == rows_of(step_prompts())[2 * first :]


def test_a_rollout_serves_each_of_its_updates():
    steps = rows_of(step_prompts())
    assert steps[0] == steps[1] == rollout_rows(7, 3, 1, 0)
    assert steps[2] == steps[3] == rollout_rows(7, 3, 1, 1)
    assert len(steps) == len(step_prompts()) == 20


def test_training_and_evaluation_have_the_same_prompt():
    tokenizer = load_tokenizer(TINY)
    config = DataConfig(task="arith", limit=5, prompt_template="Solve: {question}", system_prompt="Be brief.")
    prompts = load_prompts(config, tokenizer, 1)
    for row, prompt in enumerate(prompts):
        messages = build_messages("arith", prompt.example.question, "Be brief.", "Solve: {question}")
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert prompt.ids == render_prompt(tokenizer, messages)
        assert prompt.text == tokenizer.decode(prompt.ids)
        assert prompt.row == row


@pytest.mark.parametrize("held_out", [5, 9])
def test_holding_out_all_rows_or_more_is_refused(held_out):
    config, tokenizer = DataConfig(task="arith", limit=5), load_tokenizer(TINY)
    assert len(load_prompts(config, tokenizer, 1, held_out=4)) == 1
    with pytest.raises(DataError, match=rf"held_out {held_out} leaves nothing of 5 usable rows"):
        load_prompts(config, tokenizer, 1, held_out=held_out)


def counts(weights, prompts, rollouts):
    taken = islice(shares(weights, prompts), rollouts)
    return [[each.count(source) for source in range(len(weights))] for each in taken]


def mixed(sources, rows, prompts, rollouts):
    return [row for taken in islice(mixed_rows(sources, rows, prompts, 0), rollouts) for row in taken]


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
    one = mixed([("a", 1), ("b", 1)], [range(9), range(9, 20)], 4, 8)
    two = mixed([("c", 3), ("a", 1)], [range(30, 90), range(9)], 4, 16)
    assert [row for row in one if row < 9] == [row for row in two if row < 9]
