"""What scripts/checks/check_recipes.py takes for a mistake, and that each of its values is a recipe."""

from types import SimpleNamespace

import pytest

from qerl.config.recipe import load_recipe
from scripts.checks.check_recipes import CHOICES, COMMON, STEPS, mistakes

CONFIG = SimpleNamespace(rollout=SimpleNamespace(prompts_per_step=3))
GOOD = {"step": 1, "kl": 0.0, "completions/truncated_share": 1.0, "sources/a/share": 2 / 3, "sources/b/share": 1 / 3}


@pytest.mark.parametrize(
    ("changed", "again", "said"),
    [
        ({}, {}, None),
        ({"completions/truncated_share": 1.1}, {"completions/truncated_share": 1.1}, "truncated_share is 1.1"),
        ({"kl": -0.1}, {"kl": -0.1}, "kl is -0.1"),
        ({"kl": None}, {"kl": None}, None),
        ({}, {"kl": 1e-9}, "resumed, it has another kl"),
    ],
)
def test_what_is_a_mistake(changed, again, said):
    found = mistakes([GOOD | changed], [GOOD | again], CONFIG)
    assert [said in text for text in found] == ([True] if said else [])


def test_a_source_that_gives_its_prompts_to_another_is_a_mistake():
    rows = [GOOD | {"step": step, "sources/a/share": 0.0, "sources/b/share": 1.0} for step in (1, 2)]
    assert mistakes(rows, rows, CONFIG) == [
        "source a has 0 prompts, and by its weight 4",
        "source b has 6 prompts, and by its weight 2",
    ]


def test_each_choice_alone_is_a_recipe():
    for row in CHOICES:
        for overrides in row:
            load_recipe("tiny", [*COMMON, *overrides], steps=STEPS)
