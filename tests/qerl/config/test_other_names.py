"""What other trainers call our keys: docs/other-names.md says what an unknown key is answered with."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from qerl.api.arguments import OF_TRL
from qerl.base.errors import ConfigError
from qerl.config.keys import describe_config, nearest_key
from qerl.config.names import OTHER_NAMES
from qerl.config.recipe import load_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "other-names.md").read_text(encoding="utf-8")
FROM_TRL = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
TRAINERS = ("TRL, PEFT", "Unsloth", "Axolotl", "verl", "NeMo RL")


def table(first):
    """(their names, ours) of each row of the page's table whose first column has this title."""
    page = FROM_TRL if first == "argument" else PAGE
    body = re.search(rf"^\| {first}.* \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)[1]
    for line in body.splitlines():
        *theirs, ours = [re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|").split("|")]
        yield [name for cell in theirs for name in cell], ours[0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_unknown_key_is_answered_as_the_page_says(trainer):
    keys = [f"{row.key}." for row in describe_config()]
    found = [(name, nearest_key(tuple(name.split("."))), ours) for theirs, ours in table(trainer) for name in theirs]
    assert len(found) > 5
    assert [each for each in found if each[1] != each[2]] == []
    assert [ours for *_, ours in found if not any(key.startswith(f"{ours}.") for key in keys)] == []


def test_names_of_trl_and_peft_exist_there_and_all_that_we_answer_are_on_the_page():
    from peft import LoraConfig
    from transformers import EarlyStoppingCallback
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, SFTConfig
    from trl.trainer.distillation_config import DistillationConfig

    configs = (GRPOConfig, SFTConfig, DistillationConfig, ModelConfig, ScriptArguments, LoraConfig)
    theirs = {field.name for config in configs for field in fields(config)}
    arguments = {*inspect.signature(GRPOTrainer.__init__).parameters}
    theirs |= arguments | {*inspect.signature(EarlyStoppingCallback.__init__).parameters}
    named = {name for names, _ in table("TRL, PEFT") for name in names}
    assert named - theirs == set()
    others = [row for title in (*TRAINERS[1:], "argument") for row in table(title)]
    assert set(OTHER_NAMES) & theirs - named - {name for names, _ in others for name in names} == set()
    assert {names[0]: ours for names, ours in table("argument")} == OF_TRL
    assert set(OF_TRL) <= arguments
    ours = {"dataset", "validation.rows"}  # what people write by mistake
    assert set(OTHER_NAMES) - ours <= named | {name for names, _ in others for name in names}


@pytest.mark.parametrize(
    ("given", "key"),
    [  # as they stand in a command of verl or NeMo RL, and in a file of Axolotl
        ("actor_rollout_ref.rollout.n=8", "rollout.group_size"),
        ("algorithm.filter_groups.enable=true", "rollout.dynamic_sampling.enabled"),
        ("trainer.test_freq=5", "validation.every"),
        ("policy.dtensor_cfg.lora_cfg.dim=8", "adapter.rank"),
        ("policy.optimizer.kwargs.lr=1e-6", "optim.learning_rate"),
        ("trl={beta: 0.1, num_generations: 4}", "loss.kl_coef"),
        ("trl={foo: 1, temperature: 0.9}", "rollout.temperature"),
        ("rolout={group_size: 4}", "rollout"),
        ("rolout.group_size=4", "rollout"),
    ],
)
def test_a_key_in_a_section_of_theirs_is_answered_with_ours(given, key):
    with pytest.raises(ConfigError, match=rf": unknown key; did you mean {re.escape(key)}\?"):
        load_recipe("tiny", [given])
