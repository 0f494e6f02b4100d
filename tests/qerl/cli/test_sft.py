"""`qerl sft`: what it makes of a recipe. Its runs are in tests/training/sft."""

from qerl.cli.train import SftOptions, config_of
from qerl.config.recipe import load_recipe


def test_a_recipe_s_own_section_stays():
    own = load_recipe("sft_tiny")
    assert (own.sft.rows_per_step, own.sft.max_tokens) == (32, 256)
    assert config_of(SftOptions(), "sft_tiny") == own


def test_a_recipe_without_the_section_gets_its_defaults():
    assert config_of(SftOptions(), "tiny").sft == load_recipe("sft_7b").sft
