"""scripts/study/study_experts.py: its arms, and the results that ship."""

import json
from pathlib import Path

import pytest

from qerl.config.recipe import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "benchmarks" / "experts" / "study-experts-tiny.json"


@pytest.fixture(scope="module")
def found():
    return json.loads(SHIPPED.read_text(encoding="utf-8"))


def test_arms_differ_in_the_model_and_in_what_is_adapted_only(load) -> None:
    arms = load("study_arms")
    settings = arms.JobSettings("tiny_experts", "arith", 80, "transformers", [], 3, 2)
    configs = {
        name: load_recipe(arms.RECIPE, arms.overrides_of(arms.Job(name, 1e-3, 0), settings, Path("w")), steps=80)
        for name in arms.EXPERTS_ARMS
    }
    told = {name: (config.model.base, config.adapter.experts) for name, config in configs.items()}
    assert told == {
        "dense": ("w/tiny-nvfp4", "shared"),  # which a dense model does not ask for
        "experts_shared": ("w/nvfp4", "shared"),
        "experts_per_expert": ("w/nvfp4", "per_expert"),
        "experts_none": ("w/nvfp4", "none"),
    }
    for config in configs.values():
        assert config.model.format == "nvfp4"
        for section in ("data", "rewards", "rollout", "loss", "noise", "optim", "run"):
            assert getattr(config, section) == getattr(configs["dense"], section)


@pytest.mark.usefixtures("one_thread")
def test_replay_takes_away_what_other_experts_change_and_nothing_is_there_without_rounding(load, nvfp4_moe) -> None:
    measured = load("replay_mismatch").measured
    prompts = [list(range(first, first + 12)) for first in range(3, 27, 3)]
    exact, rounded = (measured(nvfp4_moe, prompts, way, seed=0) for way in ("float32", "bfloat16"))
    assert max(exact.values()) < 1e-9
    assert rounded["changed"] > 1e-3
    assert 0 < rounded["with_replay"] < rounded["without_replay"] / 1.2


def test_the_page_of_the_shipped_results_is_drawn_from_them(load, found) -> None:
    page = load("study_report").page(found, f"{SHIPPED.parent.name}/{SHIPPED.name}")
    assert SHIPPED.with_suffix(".md").read_text(encoding="utf-8") == page, "run the report of study_experts.py"


def test_in_the_shipped_results_shared_factors_learn_as_the_dense_twin_does(load, found) -> None:
    report = load("study_report")
    runs = {arm: report.finals(found, arm) for arm in load("study_arms").EXPERTS_ARMS}
    assert all([run["seed"] for run in each] == [0, 1, 2] for each in runs.values())
    assert all(report.rises(each) for each in runs.values())
    after = {arm: report.answers(each).mean() for arm, each in runs.items()}
    assert abs(after["experts_shared"] - after["dense"]) < 0.01
    assert after["experts_per_expert"] < after["experts_shared"]
