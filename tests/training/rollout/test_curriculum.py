"""Rows by their solved share: which are passed over, what a checkpoint keeps, and the same bits after a kill."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import training.rollout.prompts
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.loss.groups import Prompt
from training.rewards.rewards import Rewards
from training.rollout.prompts import FILE, Curriculum, mixed_rows, rollout_rows
from training.run import resume, start

REWARDS = Rewards([SimpleNamespace(__name__="accuracy")], [1.0])
BY_ROW = '''
def solved(completions, row, **columns):
    """Rows that 3 divides are always right, those one above never, and of the others half."""
    return [float((1, 0, place % 2)[number % 3]) for place, number in enumerate(row)]
'''


def curriculum(rows=30):
    prompts = [Prompt(row, [row], "", None) for row in range(rows)]
    return Curriculum([("", 1.0)], prompts, REWARDS, seed=3)


@pytest.fixture
def never(monkeypatch):
    """No hard and no easy row is tried again."""
    monkeypatch.setattr(training.rollout.prompts, "HARD_SHARE", 0)
    monkeypatch.setattr(training.rollout.prompts, "EASY_SHARE", 0)


def group(row, right, of=4):
    rewards = torch.tensor([1.0] * right + [0.0] * (of - right))[:, None]
    return SimpleNamespace(group=SimpleNamespace(prompt=SimpleNamespace(row=row, source=0)), rewards_G_F=rewards)


def played(this, rollouts, prompts=5, first=0):
    """The rows of so many rollouts, each of which is measured: row r has r % 5 right completions of 4."""
    taken = []
    for rollout in range(first, first + rollouts):
        taken.append(this.rows(rollout, prompts))
        this.observe([group(row, row % 5) for row in taken[-1]])
    return taken


def test_the_first_epoch_is_that_of_a_run_without_a_curriculum():
    assert played(curriculum(), 6) == [rollout_rows(30, 5, 3, rollout) for rollout in range(6)]


def test_with_several_sources_the_first_epochs_are_those_of_a_run_without_a_curriculum():
    places, sources = [list(range(12)), list(range(12, 20))], [("a", 2.0), ("b", 1.0)]
    prompts = [Prompt(row, [row], "", None, source=int(row >= 12)) for row in range(20)]
    rewards = Rewards([SimpleNamespace(__name__="accuracy")] * 2, [1.0] * 2, (0, 1), ("a", "b"))
    this, expected = Curriculum(sources, prompts, rewards, 3), mixed_rows(sources, places, 5, 3)
    for rollout in range(6):
        assert this.rows(rollout, 5) == next(expected)


def test_rows_that_were_always_or_never_right_are_passed_over_while_there_are_others(never):
    few = curriculum(rows=6)
    for rollout in range(9):
        taken = few.rows(rollout, 4)
        assert len(set(taken)) == 4
        few.observe([group(row, 0) for row in taken])
    this = curriculum()
    played(this, 6)
    shares = {"measured_share": 1.0, "hard_share": 6 / 30, "easy_share": 6 / 30, "passed_rows": 0.0}
    assert this.metrics() == {f"curriculum/{name}": share for name, share in shares.items()}
    later = [row for taken in played(this, 18, first=6) for row in taken]
    assert {row % 5 for row in later} == {1, 2, 3}
    assert all(later.count(row) == 5 for row in set(later))  # 90 prompts over 18 rows
    assert this.metrics()["curriculum/passed_rows"] > 0


def test_a_share_of_them_comes_again():
    this = curriculum(rows=400)
    played(this, 20, prompts=20)
    epochs = [row for taken in played(this, 3 * 14, prompts=20, first=20) for row in taken]
    rest = len([row for row in epochs if row % 5 in (1, 2, 3)]) / 240
    assert len([row for row in epochs if row % 5 == 0]) / 80 / rest == pytest.approx(0.2, abs=0.07)
    assert len([row for row in epochs if row % 5 == 4]) / 80 / rest == pytest.approx(0.1, abs=0.07)


def test_a_loaded_state_continues_with_the_same_rows_also_within_a_step(tmp_path):
    whole = played(curriculum(), 20)
    this = curriculum()
    played(this, 9)
    this.save(tmp_path, 9)
    between = json.loads((tmp_path / FILE).read_text())
    this.observe([group(row, 0) for row in this.rows(9, 5)])  # a step that is then left
    this.save(tmp_path, 9)
    assert json.loads((tmp_path / FILE).read_text()) == between
    again = curriculum()
    again.load(tmp_path)
    assert played(again, 11, first=9) == whole[9:]


def test_extra_prompts_of_dynamic_sampling_begin_with_rows_that_are_neither():
    this = curriculum(rows=10)
    this.observe([group(row, row % 5) for row in range(10)])
    assert this.preferred([0, 9, 8, 1, 4, 3]) == [8, 1, 3, 0, 9, 4]


@pytest.mark.usefixtures("one_thread")
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(nvfp4_base, tmp_path):
    (tmp_path / "solved.py").write_text(BY_ROW)
    settings = ("data.limit=6", "data.curriculum=true")
    settings += (f"rewards=[{{name: '{tmp_path}/solved.py:solved'}}]",)
    whole = start(small_config(nvfp4_base, tmp_path, *settings), "tiny").run_dir
    again = resume(shutil.copytree(whole, tmp_path / "again"), step=4)
    rows = numbers(whole)
    assert numbers(again.run_dir) == rows
    assert same_adapters(again.adapter, whole / "adapter")
    assert [row["curriculum/measured_share"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert rows[-1]["curriculum/hard_share"] == rows[-1]["curriculum/easy_share"] == pytest.approx(1 / 3)
    shares = [row["groups/zero_variance_share"] for row in rows]
    assert sum(shares[3:]) < sum(shares[:3])


@pytest.mark.parametrize(("names", "hard"), [(("format", "accuracy"), [0]), (("format", "length"), [1])])
def test_of_several_rewards_accuracy_says_what_is_right_or_else_the_first(names, hard):
    rewards = Rewards([SimpleNamespace(__name__=name) for name in names], [1.0, 1.0])
    this = Curriculum([("", 1.0)], [Prompt(row, [row], "", None) for row in range(2)], rewards, 3)
    for row, (first, second) in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        prompt = SimpleNamespace(prompt=SimpleNamespace(row=row, source=0))
        this.observe([SimpleNamespace(group=prompt, rewards_G_F=torch.tensor([[first, second]] * 2))])
    assert this.preferred([0, 1]) == [0, 1]
    assert this.metrics()["curriculum/hard_share"] == this.metrics()["curriculum/easy_share"] == 1 / 2
    assert [row for row, share in this.state()["solved"].items() if share == 0] == hard
