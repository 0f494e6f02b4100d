"""Which prompts a step trains on: that depends on seed and rollout alone, wherever a run starts."""

import pytest
from bases import TINY

from qerl.checkpoint.load import load_tokenizer
from qerl.config.schema import DataConfig
from qerl.tasks import build_messages, render_prompt
from training.rollout.groups import Prompt
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


def test_more_prompts_than_rows_wrap_around():
    assert len(rollout_rows(2, 5, 0, 3)) == 5


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
