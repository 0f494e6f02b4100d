"""`qerl.sft`: rows of a program are learned, and `qerl.train` goes on from the run."""

import pytest

import qerl
from tests.helpers.small_sft import SETTINGS, TALKS

SIXTEEN_BITS = qerl.Recipe.load("sft_tiny").set("model.format=bf16")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_of_a_program_are_learned_and_kept(nvfp4_base, tmp_path):
    recipe = qerl.Recipe.load("sft_tiny").set(*SETTINGS[1:], {"model.base": str(nvfp4_base)})
    run = qerl.sft(recipe, data=[{"messages": talk} for talk in TALKS], steps=3, out=tmp_path / "run")
    assert (run.steps, run.finished) == (3, True)
    assert ", loss " in repr(run)
    assert run.metrics["nll"].iloc[-1] < run.metrics["nll"].iloc[0]
    assert run.recipe.config.data.task == "own"
    further = qerl.sft(resume=run, steps=4)
    assert further.steps == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "None is no recipe: give the name of one"),
        ({"recipe": "sft_tiny", "reward": len}, "qerl.sft takes no argument 'reward'"),
        ({"recipe": SIXTEEN_BITS, "data": [{"messages": "hi"}] * 40}, "no row can be learned from"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_one_line(tmp_path, given, says):
    with pytest.raises(qerl.QerlError, match=says) as error:
        qerl.sft(given.pop("recipe", None), **given, **({"out": tmp_path / "run", "quantize": False} if given else {}))
    assert "\n" not in str(error.value)
