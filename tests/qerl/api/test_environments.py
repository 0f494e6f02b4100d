"""`qerl.train` with an environment and tools that are objects of the program."""

import pytest

import qerl
from qerl.base.errors import ConfigError
from qerl.config.recipe import save_config
from qerl.episodes.build import KNOWN, TOOLS
from tests.helpers import own_environments
from tests.helpers.small_run import numbers, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


def counted(environments, **columns):
    return [one.goal + one.count for one in environments]


def began(completion, turns):
    return len(turns) > 0


def test_a_class_in_the_form_of_trl_trains_and_resumes(tiny_turns_recipe):
    known = dict(KNOWN), set(TOOLS)
    given = {"environment": own_environments.Chosen, "tools": [own_environments.double]}
    rewards = ["environment", counted]
    run = qerl.train(tiny_turns_recipe, task="environment", reward=rewards, **given)
    assert run.finished
    row = numbers(run.path)[-1]
    assert {"environment/turns", "rewards/environment", "rewards/counted"} < row.keys()
    assert row["rewards/counted"] >= 2  # the goal
    assert row["environment/failed_share"] == 0
    assert (dict(KNOWN), set(TOOLS)) == known
    assert run.recipe.config.environment.name == "python:Chosen"
    with pytest.raises(ConfigError, match=r"python:double is an object of the Python program that began the run"):
        qerl.train(resume=run, steps=2, reward=rewards)
    with pytest.raises(ConfigError, match="or --environment none for completions of one turn"):
        qerl.evaluate("environment", run, limit=1, max_new_tokens=4)
    measured = qerl.evaluate("environment", run, limit=1, max_new_tokens=4, grader=began, **given)
    assert (measured.summary.accuracy.value, dict(KNOWN)) == (1.0, known[0])
    assert qerl.train(resume=run, steps=2, reward=rewards, **given).steps == 2


def test_a_reward_that_asks_for_environments_of_another_process_hears_what_to_write(tiny_turns_recipe):
    name = f"{own_environments.__file__}:Chosen"
    with pytest.raises(ConfigError, match="get_reward in the class and the reward `environment`"):
        qerl.train(tiny_turns_recipe, task="environment", reward=counted, environment=name)


@pytest.fixture
def tiny_turns_recipe(tmp_path):
    settings = ("model.format=bf16", "data.source=null", "noise.enabled=false", "environment.max_turns=2")
    longer = ("rollout.max_new_tokens=40", "data.max_prompt_tokens=400", "run.micro_batch_tokens=2000")
    config = small_config("tiny_turns", tmp_path, "environment={name: calculator}", *settings, *longer, steps=1)
    save_config(config, tmp_path / "recipe.yaml")
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": 3}, "3 is no environment and no tool: give a class or a function with a name"),
        ({"tools": [lambda number: number]}, "is no environment and no tool"),
        ({"tools": "calculater"}, "calculater: there is no such tool; write environment.tools.0: calculator"),
        ({"train_dataset": []}, "no argument 'train_dataset'; did you mean data?"),
        ({"environment": type("word_game", (), {})}, "'word_game' is the name of another environment"),
    ],
)
def test_what_is_no_environment_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        qerl.train("tiny", **given)
