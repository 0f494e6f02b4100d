"""`qerl distill`: what it makes of a recipe. Its runs are in tests/training/test_distillation.py."""

import pytest

from qerl.base.errors import ConfigError
from qerl.cli.train import DistillOptions, config_of
from qerl.config.recipe import load_recipe, recipe_names

LEARNING = [name for name in recipe_names() if load_recipe(name).sft is None]


@pytest.mark.parametrize("name", LEARNING)
def test_any_recipe_that_samples_can_distil(name):
    config = config_of(DistillOptions(teacher="Qwen/Qwen3-8B"), name)
    assert config.distill.teacher == "Qwen/Qwen3-8B"
    assert not config.rollout.dynamic_sampling.enabled
    assert config.loss.kl_coef == config.loss.entropy_coef == 0
    own = load_recipe(name)
    assert (config.rollout.group_size, config.qat, config.optim) == (own.rollout.group_size, own.qat, own.optim)


def test_a_recipe_s_own_section_stays():
    assert config_of(DistillOptions(overrides=("distill.beta=0.5",)), "qad_tiny").distill.beta == 0.5
    assert config_of(DistillOptions(), "qad_tiny").distill == load_recipe("qad_tiny").distill


def test_a_recipe_that_learns_from_given_rows_cannot_distil():
    with pytest.raises(ConfigError, match=r"^qerl distill: distill given with sft given: .*write distill: null, or"):
        config_of(DistillOptions(), "sft_tiny")


def test_what_is_asked_for_although_it_has_no_part_in_it_is_refused():
    with pytest.raises(ConfigError, match=r"--set loss\.kl_coef=0\.1: .* write loss\.kl_coef: 0"):
        config_of(DistillOptions(overrides=("loss.kl_coef=0.1",)), "qad_tiny")
