"""What other trainers call our keys: docs/coming-from.md says what an unknown key is answered with."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from qerl.api.arguments import OF_TRL
from qerl.config.keys import OTHER_NAMES, describe_config, nearest_key

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")


def table(first):
    """(their names, ours) of each row of the page's table whose first column has this title."""
    body = re.search(rf"^\| {first}.* \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.MULTILINE)[1]
    for line in body.splitlines():
        *theirs, ours = [re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|").split("|")]
        yield [name for cell in theirs for name in cell], ours[0]


@pytest.mark.parametrize("trainer", ["TRL, PEFT", "Unsloth", "Axolotl", "verl"])
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
    others = [row for title in ("Unsloth", "Axolotl", "verl", "argument") for row in table(title)]
    assert set(OTHER_NAMES) & theirs - named - {name for names, _ in others for name in names} == set()
    assert {names[0]: ours for names, ours in table("argument")} == OF_TRL
    assert set(OF_TRL) <= arguments
