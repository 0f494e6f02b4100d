"""Which environment an evaluation has, and what it says of an episode."""

import json
from contextlib import nullcontext

import pytest

from eval.plan import episode_fields, find_environment, identity_of
from eval.run import run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.config.environment import EnvironmentConfig
from qerl.config.recipe import save_config
from qerl.episodes.driven import Episode, Turn
from tests.helpers.processes import until_gone
from tests.helpers.small_run import small_config


@pytest.fixture
def run_with(tmp_path):
    def make(environment):
        save_config(small_config("tiny", tmp_path, f"environment={environment}"), tmp_path / "config.yaml")
        return tmp_path

    return make


def test_the_run_s_environment_is_played_if_it_ships_with_qerl(run_with):
    trained = run_with("{name: word_game, max_turns: 3}")
    assert find_environment(EvalSettings("word_game"), trained) == EnvironmentConfig(name="word_game", max_turns=3)
    assert find_environment(EvalSettings("word_game", environment="none"), trained) is None
    other = find_environment(EvalSettings("word_game", environment="calculator"), trained)
    assert (other.name, other.max_turns) == ("calculator", EnvironmentConfig().max_turns)


def test_one_of_the_user_s_own_has_to_be_named_and_then_keeps_its_settings(run_with):
    trained = run_with("{name: 'guess.py:Guess', tools: [], max_turns: 3, args: {top: 9}}")
    with pytest.raises(ConfigError, match=r"chooses no code: add --environment guess\.py:Guess, or --environment none"):
        find_environment(EvalSettings("arith"), trained)
    named = find_environment(EvalSettings("arith", environment="guess.py:Guess"), trained)
    assert (named.max_turns, named.args) == (3, {"top": 9})


def test_a_model_that_is_no_run_has_the_environment_that_is_named():
    assert find_environment(EvalSettings("arith"), None) is None
    assert find_environment(EvalSettings("arith", environment="http://localhost:1"), None).name == "http://localhost:1"


def test_a_row_says_what_became_of_an_episode():
    turns = (Turn("assistant", "a", 1), Turn("user", "no", 2), Turn("assistant", "b", 1))
    fields = episode_fields(Episode([9], *([()] * 3), turns, "b", 0.5, "turns", False, None, 0, 0, 0, 0.0))
    assert (fields["ended"], fields["environment_reward"], len(fields["turns"])) == ("turns", 0.5, 3)
    assert episode_fields(Episode(*([()] * 5), "", 0.0, "failed", False, "hung", 0, 0, 0, 0.0))["ended"] == "hung"


def test_another_file_of_the_environment_is_another_evaluation(tmp_path):
    class Played:
        class runner:
            files = (str(tmp_path / "guess.py"),)

    (tmp_path / "guess.py").write_text("a = 1")
    config = EnvironmentConfig(name="guess.py:Guess")
    before = identity_of(config, Played)
    assert identity_of(config, Played) == before
    (tmp_path / "guess.py").write_text("a = 2")
    assert identity_of(config, Played) != before
    assert identity_of(EnvironmentConfig(name="guess.py:Guess", max_turns=2), Played) != identity_of(config, Played)


SOURCE = """
import os
from pathlib import Path

Path(__file__).with_name("pid").write_text(str(os.getpid()))

class Told:
    def reset(self, example):
        return "Go."

    def step(self, action):
        return None, 1.0, True
"""


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]], ids=["played", "no row is left"])
def test_the_processes_of_an_evaluation_end_with_it(tmp_path, tools):
    (tmp_path / "told.py").write_text(SOURCE)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Go", "answer": "1", "tools": tools}) + "\n")
    given = {"model": "tiny_turns", "data": str(tmp_path / "rows.jsonl"), "environment": f"{tmp_path / 'told.py'}:Told"}
    wanted = pytest.raises(DataError, match="no row can be asked") if tools else nullcontext()
    with wanted:
        run_eval(EvalSettings("own", engine="transformers", max_new_tokens=4, out=tmp_path / "out", **given))
    assert until_gone([int((tmp_path / "pid").read_text())])


def test_a_module_that_an_environment_imports_is_part_of_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "told_helper.py").write_text("GIVEN = 1.0\n")
    text = SOURCE.replace("import os\n", "import os\nimport told_helper\n").replace("1.0", "told_helper.GIVEN")
    (tmp_path / "told.py").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Go", "answer": "1"}) + "\n")
    given = {"model": "tiny_turns", "data": str(tmp_path / "rows.jsonl"), "environment": f"{tmp_path / 'told.py'}:Told"}
    settings = EvalSettings("own", engine="transformers", max_new_tokens=4, out=tmp_path / "out", **given)
    run_eval(settings)
    (tmp_path / "told_helper.py").write_text("GIVEN = 7.0\n")
    with pytest.raises(CheckpointError, match=r"other settings \(environment"):
        run_eval(settings)
