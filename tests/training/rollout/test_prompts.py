"""Which prompts a step trains on: a pure function of (seed, rollout), the same wherever a run starts."""

from itertools import islice

import pytest
from bases import TINY

from qerl.checkpoint.load import load_tokenizer
from qerl.config.schema import DataConfig
from qerl.tasks import build_messages, render_prompt
from training.rollout.prompts import PromptSampler, load_prompts, rollout_rows


def sampler(**changes):
    return PromptSampler(
        **({"rows": 7, "prompts_per_step": 3, "group_size": 2, "repeats": 2, "rollouts": 10, "seed": 1} | changes)
    )


def test_every_row_comes_once_an_epoch():
    picked = [row for rollout in range(7) for row in rollout_rows(7, 3, 0, rollout)]  # 21 rows: 3 epochs
    for epoch in range(3):
        assert sorted(picked[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert picked[:7] != picked[7:14]


def test_more_prompts_than_rows_wrap_around():
    assert len(rollout_rows(2, 5, 0, 3)) == 5


@pytest.mark.parametrize("start", [1, 4, 9])
def test_starting_later_sees_what_the_whole_run_sees_there(start):
    per_rollout = 3 * 2 * 2
    whole = list(islice(sampler(), 10 * per_rollout))
    assert list(islice(sampler(start=start), (10 - start) * per_rollout)) == whole[start * per_rollout :]


def test_groups_stand_together_and_rollouts_repeat():
    first = list(islice(sampler(), 12))
    assert first[:6] == first[6:]  # one rollout, fetched once for each micro-batch
    assert first[0:6:2] == first[1:6:2] == rollout_rows(7, 3, 1, 0)
    assert len(sampler()) == 10 * 3 * 2 * 2


def test_seeds_order_the_rows_differently():
    orders = {tuple(islice(sampler(seed=seed, rows=100), 6)) for seed in range(5)}
    assert len(orders) == 5


def test_the_prompt_that_trains_is_the_prompt_that_is_evaluated():
    tokenizer = load_tokenizer(TINY)
    config = DataConfig(task="arith", limit=5, prompt_template="Solve: {question}", system_prompt="Be brief.")
    prompts = load_prompts(config, tokenizer, 1)
    for example, row in zip(prompts.examples, prompts.dataset, strict=True):
        messages = build_messages("arith", example.question, "Be brief.", "Solve: {question}")
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert prompts.ids_by_text[row["prompt"]] == render_prompt(tokenizer, messages)
        assert prompts.examples[row["row"]] is example
