"""What `qerl distill` and `qerl sft` make of a recipe. Their runs are in tests/training."""

import pytest

from qerl.base.errors import ConfigError
from qerl.cli.train import DistillOptions, SftOptions, config_of
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


def test_a_section_sft_of_its_own_stays():
    own = load_recipe("sft_tiny")
    assert (own.sft.rows_per_step, own.sft.max_tokens) == (32, 256)
    assert config_of(SftOptions(), "sft_tiny") == own


def test_a_recipe_without_the_section_gets_its_defaults():
    assert config_of(SftOptions(), "tiny").sft == load_recipe("sft_7b").sft
