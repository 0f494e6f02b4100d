"""Of which kind a run is: made from its recipe, kept in run.json, and read from there."""

import json

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import BASE, kind_of_run
from qerl.config.objectives import RunKind
from qerl.config.recipe import load_recipe, save_config

KINDS = {
    "tiny": RunKind(learns="samples", trains="adapter"),
    "qad_tiny": RunKind(learns="teacher", trains="weights"),
    "sft_tiny": RunKind(learns="conversations", trains="adapter"),
    "qat_tiny": RunKind(learns="samples", trains="weights"),
    "qat_tiny qat.mode=adapter": RunKind(learns="samples", trains="packed_adapter"),
}


def write(run, recipe, about=None):
    run.mkdir()
    name, *overrides = recipe.split()
    save_config(load_recipe(name, overrides), run / "config.yaml")
    if about is not None:
        (run / "run.json").write_text(about)
    return run


@pytest.mark.parametrize(("recipe", "kind"), KINDS.items())
@pytest.mark.parametrize("about", [None, "{}", '{"kind": {"learns": "rewards", "trains": "adapter"}}', "[1]", "{"])
def test_where_run_json_does_not_say_it_the_recipe_does(tmp_path, recipe, kind, about):
    assert kind_of_run(write(tmp_path / "run", recipe, about)) == kind
    assert (kind.packs, kind.has_adapter) == (kind.trains != "adapter", kind.trains != "weights")


def test_run_json_decides_and_not_the_files_beside_it(tmp_path):
    about = json.dumps({"kind": RunKind(learns="samples", trains="adapter").model_dump()})
    run = write(tmp_path / "run", "qat_tiny", about)
    (run / BASE).mkdir()
    assert not kind_of_run(run).packs


def test_a_folder_that_is_no_run_has_no_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.yaml cannot be read .*give another run"):
        kind_of_run(tmp_path)
