"""Hours of a run: steps with full and with likely lengths, and what the plan assumes of them."""

import json
import random
from statistics import mean

import pytest
from typer.testing import CliRunner

from qerl.base.errors import ConfigError
from qerl.cli.main import app
from qerl.config.recipe import load_recipe
from qerl.config.train import TrainConfig
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import read_sizes
from training.preflight.advice import duration, in_words, likely
from training.preflight.plan import plan
from training.preflight.seconds import Lengths, decode_seconds, full_lengths, step_seconds


def planned(*overrides, recipe="dapo_7b", gpu="24"):
    config = load_recipe(recipe, list(overrides))
    return config, plan(config, read_sizes(config.model.base), card_of(gpu))


def seconds(config, made, lengths):
    return step_seconds(config, made.sizes, made.card, made.micro_batches, lengths)


@pytest.mark.parametrize(("gpu", "said"), [("24", "237 hours (9.9 days)"), ("4090", "133 hours (5.6 days)")])
def test_the_plan_says_what_a_whole_run_takes(gpu, said):
    config, made = planned(gpu=gpu)
    assert sum(made.seconds.values()) * 500 / 3600 == pytest.approx(float(said.split()[0]), abs=0.5)
    first, second = duration(config, made, likely(config))
    assert first == f"All 500 steps take {said} if completions and prompts have their full length."
    assert "if completions have 2048 tokens on average (--mean-completion) and prompts 1024 (the most that" in second
    assert second.endswith("not here), and what dynamic sampling discards comes on top.")


def test_a_rollout_that_serves_several_steps_counts_once():
    every = ("run.save_every=48", "validation.every=48", "loss.clip_high=0.2")
    once, several = (planned(*every, f"loss.num_iterations={n}") for n in (1, 4))
    assert several[1].seconds["rollout"] == pytest.approx(once[1].seconds["rollout"] / 4)
    assert several[1].seconds["training"] == once[1].seconds["training"]


def test_the_gradient_of_trained_weights_takes_a_third_as_long_again():
    """A Qwen2.5 7B has 6.53e9 weights in its linears, 5.70e9 of them in the feed-forward layers."""
    config, made = planned(recipe="qat_7b", gpu="h200")
    frozen, ffn = (config.model_copy(update={"qat": qat}) for qat in (None, planned(recipe="qat_7b_ffn")[0].qat))
    whole, half, none = (seconds(one, made, Lengths(100, 400))["training"] for one in (config, ffn, frozen))
    assert (whole - none) / (half - none) == pytest.approx(6.53 / 5.70, rel=2e-3)
    assert 1.3 < whole / none < 1 + 0.74 / 2  # a third product beside two, at the whole rate; the head is frozen


@pytest.mark.parametrize(("recipe", "gradients"), [("dapo_7b", 1), ("qat_7b", 1.74)])
def test_products_in_fp8_take_seven_tenths_of_their_seconds(recipe, gradients):
    """Those for dx, and of masters: at the whole rate, of which the others reach 0.74. `blockwise` rounds dx alone."""
    config, made = planned("run.gradient_checkpointing=false", recipe=recipe, gpu="h200")
    names = (None, "tensorwise", "tensorwise_gradients", "blockwise", "blockwise_gradients")
    trains = [config.model_copy(update={"train": TrainConfig(fp8_recipe=name)}) for name in names]
    plain, *rounded = (seconds(each, made, Lengths(0, 500))["training"] for each in trains)
    all_, of_gradients, blockwise, dx = (plain - each for each in rounded)
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * 500
    assert dx == pytest.approx(0.3 * 2 * 6.53e9 * tokens / (0.74 * made.card.tflops * 1e12), rel=2e-3)
    assert all_ - of_gradients == pytest.approx(blockwise - dx) == pytest.approx(dx)  # the forward product
    assert of_gradients / dx == pytest.approx(gradients, rel=2e-3)


def test_carried_over_completions_leave_no_tail():
    """Of a 7B, 128 of mean 285 tokens: async_rollouts.py of commit 812ec811, by measured decode steps, has 5.91
    s per step on one card without and 5.1 s with it, 0.8 s of that for keys and values that are computed again."""
    every = ("rollout.prompts_per_step=16", "rollout.group_size=8", "rollout.max_new_tokens=1024")
    every += ("rollout.dynamic_sampling.enabled=false", "data.max_prompt_tokens=128")
    plain, carried = (planned(*every, f"rollout.carry_over={steps}", gpu="h200") for steps in (0, 2))
    waited, full = (seconds(config, made, Lengths(128, 285)) for config, made in (plain, carried))
    assert full["training"] == waited["training"]
    assert waited["rollout"] - full["rollout"] == pytest.approx(0.8, abs=0.2)
    equal = full_lengths(plain[0])
    assert seconds(*carried, equal)["rollout"] == pytest.approx(seconds(*plain, equal)["rollout"], rel=0.01)


def test_decoding_ends_as_the_completions_do():
    """The same rollout token by token, for random lengths of the mean that is assumed, some of them cut off."""
    config, made = planned("rollout.max_new_tokens=512", "rollout.dynamic_sampling.enabled=false")
    prompt, kv_bytes, random_ = 100, made.sizes.kv_bytes(), random.Random(0)
    for scale in (80, 300):
        rollouts = [[min(512, 1 + int(random_.expovariate(1 / scale))) for _ in range(128)] for _ in range(20)]
        simulated = []
        for ends in rollouts:
            alive = [sum(end > token for end in ends) for token in range(max(ends))]
            steps = (
                decode_seconds(made.sizes, made.card, "nvfp4", count, count * (prompt + token) * kv_bytes)
                for token, count in enumerate(alive)
            )
            simulated.append(sum(steps))
        lengths = Lengths(prompt, mean(map(mean, rollouts)))
        without_prompts = seconds(config, made, Lengths(0, lengths.new))["rollout"]
        prefill = seconds(config, made, Lengths(1, 1))["rollout"] - seconds(config, made, Lengths(0, 1))["rollout"]
        assert seconds(config, made, lengths)["rollout"] - prompt * prefill == pytest.approx(mean(simulated), rel=0.03)
        assert without_prompts < mean(simulated)


def test_the_mean_completion_is_tokens_or_a_share():
    config = load_recipe("dapo_7b", [])
    assert [likely(config, given).lengths.new for given in (0.25, 1, 300, 8192)] == [2048, 8192, 300, 8192]
    for wrong in (0, -1, 9000):
        with pytest.raises(ConfigError, match=rf"--mean-completion {wrong} is no mean of completions of at most 8192"):
            likely(config, wrong)


def test_prompts_are_the_runs_own_where_they_are_at_hand(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": "x" * 400, "answer": "1"}) + "\n" for _ in range(300)))
    config = load_recipe("first_evening", ["data.prompt_template='{question}'"], data=str(rows))
    estimated = likely(config)
    template = 20 + len(config.data.system_prompt if config.data.system_prompt != "default" else "") / 4
    assert estimated.lengths.prompt == pytest.approx(100 + template, abs=30)  # and the task's system prompt
    assert estimated.prompts == "estimated from the text of 200 rows"
    assert likely(config, prompts=[10, 30]).lengths.prompt == 20
    rows.unlink()
    assert likely(config).lengths.prompt == config.data.max_prompt_tokens  # the run itself names the missing file


def test_the_command_takes_a_mean_length_and_says_times_in_the_unit_that_reads_best():
    done = CliRunner().invoke(app, ["plan", "--recipe", "first_evening", "--gpu", "24", "--mean-completion", "200"])
    assert "All 200 steps take 53 minutes if" in done.stdout
    assert "if completions have 200 tokens on average" in done.stdout
    said = [in_words(seconds) for seconds in (50, 3240, 9000, 860400)]
    assert said == ["less than 2 minutes", "54 minutes", "2.5 hours", "239 hours (10.0 days)"]
