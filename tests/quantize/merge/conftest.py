"""The trained run that the tests of merging share."""

import shutil
from pathlib import Path

import pytest

from qerl.config.recipe import load_recipe, save_config
from quantize.run import quantize_checkpoint

DATA = Path(__file__).parents[2] / "data" / "tiny_run"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The trained run, laid out as a user has it: runs/tiny_run beside checkpoints/tiny-NVFP4A16."""
    folder = tmp_path_factory.mktemp("work")
    quantize_checkpoint("tiny", folder / "checkpoints" / "tiny-NVFP4A16")
    shutil.copytree(DATA, folder / "runs" / "tiny_run")
    settings = ["adapter.rank=4", "adapter.alpha=8", "run.steps=30"]
    # The recipe is saved anew, so that its keys are those of this version.
    save_config(load_recipe("tiny", settings), folder / "runs" / "tiny_run" / "config.yaml")
    return folder / "runs" / "tiny_run"


@pytest.fixture(scope="session")
def base(run):
    return run.parents[1] / "checkpoints" / "tiny-NVFP4A16"
