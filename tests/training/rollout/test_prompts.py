"""Which prompts a step trains on: that depends on seed and rollout alone, wherever a run starts."""

import pytest
import torch

from qerl.base.errors import DataError
from qerl.base.philox import derive_seed
from qerl.checkpoint.load import load_tokenizer
from qerl.config.schema import DataConfig
from qerl.data.tasks import build_messages, render_prompt
from tests.helpers.bases import TINY
from training.loss.groups import Prompt
from training.rollout.prompts import StepPrompts, load_prompts, rollout_rows


def step_prompts(rows=7, **changes):
    prompts = [Prompt(row, [row], str(row), None) for row in range(rows)]
    return StepPrompts(**({"prompts": prompts, "per_rollout": 3, "updates": 2, "rollouts": 10, "seed": 1} | changes))


def rows_of(steps):
    return [[prompt.row for prompt in step] for step in steps]


def test_every_row_comes_once_per_epoch():
    picked = [row for rollout in range(7) for row in rollout_rows(7, 3, 0, rollout)]  # 21 rows: 3 epochs
    for epoch in range(3):
        assert sorted(picked[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert picked[:7] != picked[7:14]


@pytest.mark.parametrize(("rows", "per_step"), [(4, 3), (5, 3), (7, 3), (9, 8), (15, 8), (17, 8), (100, 32)])
def test_no_step_has_a_row_twice_at_the_end_of_an_epoch(rows, per_step):
    for seed in range(20):
        steps = [rollout_rows(rows, per_step, seed, rollout) for rollout in range(rows * 3)]
        assert [step for step in steps if len(set(step)) < per_step] == []
        picked = [row for step in steps for row in step]
        for epoch in range(3 * per_step):
            assert sorted(picked[rows * epoch : rows * (epoch + 1)]) == list(range(rows))


@pytest.mark.parametrize(("rows", "per_step"), [(6, 3), (7, 3), (100, 32), (8, 8)])
def test_a_step_within_an_epoch_and_one_without_a_repeated_row_are_slices_of_permutations(rows, per_step):
    """The order that runs had before repeated rows were moved: their numbers stay."""
    for rollout in range(rows):
        straight = plain_rows(rows, per_step, 0, rollout)
        picked = rollout_rows(rows, per_step, 0, rollout)
        if len(set(straight)) < per_step:
            at = straight.index(next(row for place, row in enumerate(straight) if row in straight[:place]))
            assert picked[:at] == straight[:at]
        elif rollout == 0 or len(set(plain_rows(rows, per_step, 0, rollout - 1))) == per_step:
            assert picked == straight


def plain_rows(rows, per_step, seed, rollout):
    """Permutations laid end to end, and cut into steps."""
    generators = (torch.Generator().manual_seed(derive_seed(seed, epoch, "data")) for epoch in range(per_step + 1))
    laid = [row for generator in generators for row in torch.randperm(rows, generator=generator).tolist()]
    return laid[rollout * per_step : (rollout + 1) * per_step]


@pytest.mark.parametrize("first", [1, 4, 9])
def test_a_later_start_gets_the_prompts_of_the_whole_run(first):
    assert rows_of(step_prompts(first=first)) == rows_of(step_prompts())[2 * first :]


def test_a_rollout_serves_each_of_its_updates():
    steps = rows_of(step_prompts())
    assert steps[0] == steps[1] == rollout_rows(7, 3, 1, 0)
    assert steps[2] == steps[3] == rollout_rows(7, 3, 1, 1)
    assert len(steps) == len(step_prompts()) == 20


def test_seeds_order_the_rows_differently():
    assert len({tuple(rows_of(step_prompts(100, seed=seed))[0]) for seed in range(5)}) == 5


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
