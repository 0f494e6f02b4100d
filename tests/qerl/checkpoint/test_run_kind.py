"""Of which kind a run is: made from its recipe, kept in run.json, and read from there."""

import json

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import BASE, kind_of_run
from qerl.config.objectives import RunKind
from qerl.config.recipe import load_recipe, recipe_names, save_config

KINDS = {
    "tiny": RunKind(learns="samples", trains="adapter"),
    "qad_tiny": RunKind(learns="teacher", trains="weights"),
    "sft_tiny": RunKind(learns="conversations", trains="adapter"),
    "qat_tiny": RunKind(learns="samples", trains="weights"),
}


def write(run, recipe, about=None, *overrides):
    run.mkdir(exist_ok=True)
    save_config(load_recipe(recipe, overrides), run / "config.yaml")
    if about is not None:
        (run / "run.json").write_text(about)
    return run


@pytest.mark.parametrize(("recipe", "kind"), KINDS.items())
@pytest.mark.parametrize("about", [None, "{}", '{"kind": {"learns": "rewards", "trains": "adapter"}}', "[1]", "{"])
def test_where_run_json_does_not_say_it_the_recipe_does(tmp_path, recipe, kind, about):
    assert load_recipe(recipe).kind == kind
    assert kind_of_run(write(tmp_path / "run", recipe, about)) == kind


def test_an_adapter_that_is_packed_is_a_kind_of_its_own(tmp_path):
    kind = kind_of_run(write(tmp_path / "run", "qat_tiny", None, "qat.mode=adapter"))
    assert (kind, kind.packs, kind.has_adapter) == (RunKind(learns="samples", trains="packed_adapter"), True, True)


def test_run_json_decides_and_not_the_files_beside_it(tmp_path):
    about = json.dumps({"kind": RunKind(learns="samples", trains="adapter").model_dump()})
    run = write(tmp_path / "run", "qat_tiny", about)
    (run / BASE).mkdir()
    assert not kind_of_run(run).packs


def test_a_folder_that_is_no_run_has_no_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.yaml cannot be read .*give another run"):
        kind_of_run(tmp_path)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_kind_that_run_json_can_hold(name):
    kind = load_recipe(name).kind
    assert RunKind.model_validate(json.loads(json.dumps(kind.model_dump()))) == kind
