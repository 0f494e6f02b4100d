"""Dynamic sampling: which groups are kept and which prompts are added, and whole runs over several rollouts."""

import json
import logging
import shutil

import pytest
import torch

from qerl.base.philox import permutation
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers.small_run import numbers, small_config
from training.loss.groups import GradedGroup, Group, Prompt, Sample, informative_groups
from training.rollout.dynamic_sampling import (
    MAX_EXTRA_ROLLOUTS,
    extra_prompts,
    fill_batch,
    keep,
    next_rows,
)
from training.rollout.prompts import rollout_rows
from training.run import resume, start
from training.run_dir.log import read_metrics


def order(rows, seed, step):
    return permutation(rows, seed, step, "extra prompts").tolist()


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
    assert order(50, 0, 3) == order(50, 0, 3)
    assert sorted(order(50, 0, 3)) == list(range(50))
    assert len({tuple(order(50, seed, step)) for seed in (0, 1) for step in (0, 1)}) == 4


@pytest.mark.parametrize("size", [1, 8, 32])
def test_with_one_informative_group_in_four_every_batch_is_filled(size):
    """All groups of every step have a signal, at a cost close to the minimum of 4 sampled groups for each."""
    torch.manual_seed(size)

    def draw(rows):
        return [group(row, torch.rand(()).item() < 0.25) for row in rows]

    steps, sampled = 100, 0
    for step in range(steps):
        batch = fill_batch(draw, list(range(size)), order(1000, 0, step), MAX_EXTRA_ROLLOUTS)
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


# --- whole runs

ROWS = 40
OVERLAPPING = ("time/step_s", "time/train_s", "time/extra_rollouts_s")
ONE_IN_FOUR = '''
from pathlib import Path


def digits(completions, row, log_metric=None, **columns):
    """Differs within a group for every fourth row only. Writes down which rows it was asked for."""
    with (Path(__file__).parent / "asked.txt").open("a") as handle:
        handle.write(" ".join(map(str, row[::4])) + "\\n")
    log_metric("asked/mean_row", sum(row) / len(row))
    return [len(set(text)) if number % 4 == 0 else 1.0 for text, number in zip(completions, row)]
'''
SETTINGS = (
    *("rollout.dynamic_sampling.enabled=true", f"data.limit={ROWS}", "logging.completions_count=8"),
    "loss.mismatch_gate=null",  # else a trial adapter comes before the first rollout
)


def configured(base, folder, *overrides, **kwargs):
    (folder / "reward.py").write_text(ONE_IN_FOUR)
    return small_config(base, folder, *SETTINGS, *overrides, **kwargs)


@pytest.fixture(scope="module")
def watched(nvfp4_base, tmp_path_factory):
    """(a finished run, for each of its rollouts the seed and the sum of the noise, or None)."""
    calls, noises = [], []
    generate, set_noise = TransformersEngine.generate, TransformersEngine.set_noise

    def noisy(self, noise):
        noises.append(None if noise is None else sum(vector.sum().item() for vector in noise.values()))
        return set_noise(self, noise)

    def spied(self, prompts, sampling, seed, *more, **others):
        calls.append((seed, noises[-1]))
        return generate(self, prompts, sampling, seed, *more, **others)

    config = configured(nvfp4_base, tmp_path_factory.mktemp("finished"), "logging.completions_every=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", spied)
        patch.setattr(TransformersEngine, "set_noise", noisy)
        return start(config, "tiny").run_dir, calls


def asked(run_dir):
    """The rows of each rollout in order."""
    return [[int(word) for word in line.split()] for line in (run_dir.parent / "asked.txt").read_text().splitlines()]


def test_every_batch_is_full_of_groups_with_a_signal(watched, caplog):
    finished, _ = watched
    with caplog.at_level("INFO"):
        resume(finished)  # nothing is left to do, so it only says how it ended
    assert "dynamic sampling: 12 of the 12 groups trained on had a signal; " in caplog.text
    rows = numbers(finished)
    assert [row["dynamic_sampling/filled_groups"] for row in rows] == [0] * 6
    assert [row["groups/zero_variance_share"] for row in rows] == [0] * 6
    assert sum(row["dynamic_sampling/extra_rollouts"] for row in rows) >= 4
    for step in range(1, 7):
        samples = [json.loads(line) for line in (finished / f"completions/step-{step:06d}.jsonl").open()]
        assert len(samples) == 8
        for group in (samples[:4], samples[4:]):  # trained on and logged are whole groups with a signal
            assert len({sample["prompt"] for sample in group}) == 1
            assert len({sample["rewards"]["digits"] for sample in group}) > 1
            assert sum(sample["advantage"] for sample in group) == pytest.approx(0, abs=1e-5)


def test_the_counts_are_those_of_all_samples(watched):
    rollouts = iter(asked(watched[0]))
    for number, row in enumerate(numbers(watched[0])):
        step = [next(rollouts) for _ in range(1 + int(row["dynamic_sampling/extra_rollouts"]))]
        assert step[0] == rollout_rows(ROWS, 2, 0, number)  # the data order does not depend on extra prompts before
        flat = [member for rollout in step for member in rollout]
        assert row["dynamic_sampling/sampled_groups"] == len(flat) == len(set(flat))
        assert row["dynamic_sampling/discarded_groups"] == len(flat) - 2
        assert row["dynamic_sampling/informative_share"] <= sum(member % 4 == 0 for member in flat) / len(flat)
        assert row["asked/mean_row"] == pytest.approx(sum(flat) / len(flat), rel=1e-6)
        assert row["sampled/digits"] == row["sampled/reward"]
        assert (row["sampled/reward"] < row["reward"]) == (len(flat) > 2)  # 1 where nothing differs
    assert next(rollouts, None) is None


def test_time_and_speed_include_all_rollouts(watched):
    for row in read_metrics(watched[0]):
        assert (row["time/extra_rollouts_s"] > 0) == (row["dynamic_sampling/extra_rollouts"] > 0)
        assert row["time/rollout_s"] + row["time/train_s"] <= row["time/step_s"] * 1.01
        parts = {key: row[key] for key in row if key.startswith("time/") and key not in OVERLAPPING}
        assert len(parts) == 8
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(row["time/step_s"])
        tokens = row["dynamic_sampling/discarded_tokens"] + row["completions/mean_tokens"] * 8
        assert row["speed/rollout_tokens_per_s"] * row["time/rollout_s"] == pytest.approx(tokens)


def test_extra_rollouts_have_the_noise_of_their_step_and_their_own_seeds(watched):
    """A prompt that is sampled again in a step must not give the same completions."""
    run_dir, calls = watched
    rows = numbers(run_dir)
    assert len({seed for seed, _ in calls}) == len(calls) > len(rows)
    rest = iter(noise for _, noise in calls)
    for row in rows:
        of_step = {next(rest) for _ in range(1 + int(row["dynamic_sampling/extra_rollouts"]))}
        assert len(of_step) == 1
        assert (of_step == {None}) == (row["noise/sigma"] == 0)


def test_a_run_goes_on_from_a_checkpoint_to_equal_numbers(watched, tmp_path):
    shutil.copytree(watched[0].parent, tmp_path / "copy")
    assert numbers(resume(tmp_path / "copy" / "run", step=4).run_dir) == numbers(watched[0])
