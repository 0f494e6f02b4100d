"""`qerl.Recipe`: the same values and the same errors as the command's options."""

from pathlib import Path

import pytest

import qerl
from qerl.config.recipe import load_config, load_recipe


def test_a_recipe_is_set_by_text_by_key_and_by_section():
    tiny = qerl.Recipe.load("tiny")
    by_text = tiny.set("run.steps=10", "rewards=[{name: accuracy, weight: 2}]", "data.limit=64")
    by_key = tiny.set({"run.steps": 10, "rewards": [{"name": "accuracy", "weight": 2}], "data.limit": 64})
    by_section = tiny.set(run={"steps": 10}, rewards=({"name": "accuracy", "weight": 2},), data={"limit": 64})
    expected = load_recipe("tiny", ["run.steps=10", "rewards=[{name: accuracy, weight: 2}]", "data.limit=64"])
    assert by_text.config == by_key.config == by_section.config == expected
    assert (tiny.config.run.steps, tiny.name) == (40, "tiny")
    assert by_key.set({"run.out": Path("runs/a")}).config.run.out == "runs/a"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("run.stps=3", "--set run.stps=3: run.stps: unknown key; did you mean run.steps?"),
        ({"run.stps": 3}, "set run.stps: run.stps: unknown key; did you mean run.steps?"),
        ({"run": {"steps": "x"}}, "set run: run.steps: got 'x' (text), expected whole number >= 1"),
        ({"optim.learning_rate": 0.0}, "optim.learning_rate"),
        ("run.steps", "is not KEY=VALUE"),
        (3, "3 is no change: write 'run.steps=10'"),
    ],
)
def test_a_mistake_is_the_line_of_the_command(change, line):
    with pytest.raises(qerl.QerlError) as refused:
        qerl.Recipe.load("tiny").set(change)
    assert line in str(refused.value)


def test_a_saved_recipe_is_read_again(tmp_path):
    recipe = qerl.Recipe.load("tiny").set("run.steps=7", "noise.enabled=false")
    path = recipe.save(tmp_path / "mine.yaml")
    assert load_config(path) == recipe.config
    assert str(recipe) == path.read_text(encoding="utf-8")
    assert qerl.Recipe.load(path).name == "mine"
    with pytest.raises(qerl.QerlError, match=r"nowhere/mine.yaml cannot be written \(No such file"):
        recipe.save(tmp_path / "nowhere" / "mine.yaml")
    with pytest.raises(qerl.QerlError, match=r"3 is no recipe: give the name"):
        qerl.Recipe.load(3)


def test_the_plan_says_what_the_command_prints(here):
    planned = qerl.Recipe.load("dapo_14b").set({"rollout.max_new_tokens": 12288}).plan("4090")
    code, printed, _ = here("plan", "--recipe", "dapo_14b", "--set", "rollout.max_new_tokens=12288", "--gpu", "4090")
    assert (planned.fits, code) == (False, 1)
    assert str(planned).split() == printed.split()
    tiny = qerl.Recipe.load("tiny")
    assert str(tiny.plan(24)) == str(tiny.plan("24"))


def test_a_value_that_nests_without_end_is_refused():
    deep = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(qerl.QerlError, match="nests too deeply"):
        qerl.Recipe.load("tiny").set({"data.columns": deep})
