"""A run on several sources is evaluated with the prompt that it learned for the task in question."""

import json

import pytest

from eval.plan import with_prompt
from eval.settings import EvalSettings
from qerl.base.errors import ConfigError
from qerl.config.recipe import save_config
from qerl.data.tasks import get_task
from tests.helpers.small_run import small_config

SOURCES = [{"name": "sums"}, {"name": "chains", "task": "math500", "grader": "mine.py"}]


@pytest.fixture
def run(tmp_path):
    listed = f"data.sources={json.dumps(SOURCES)}"
    config = small_config("tiny", tmp_path, "data.source=null", "data.limit=null", listed, "data.system_prompt=Any.")
    save_config(config, tmp_path / "config.yaml")
    return tmp_path


def test_each_task_has_the_prompt_of_its_source(run):
    assert with_prompt(get_task("arith"), EvalSettings("arith"), run).system_prompt == "Any."
    assert with_prompt(get_task("gsm8k"), EvalSettings("gsm8k"), run).system_prompt == "Any."  # else that of the first
    with pytest.raises(ConfigError, match=r"was trained with the grader mine\.py"):
        with_prompt(get_task("math500"), EvalSettings("math500"), run)
