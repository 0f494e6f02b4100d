"""The trained adapters that the tests of merging share."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl.config.recipe import load_recipe, save_config
from quantize.run import quantize_checkpoint
from tests.helpers.roundings import ROUNDING, rounding
from tests.helpers.started import make_adapter, small_bases

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The trained run, laid out as a user has it: runs/tiny_run beside checkpoints/tiny-NVFP4A16."""
    folder = tmp_path_factory.mktemp("work")
    quantize_checkpoint("tiny", folder / "checkpoints" / "tiny-NVFP4A16", ROUNDING)
    shutil.copytree(DATA / "tiny_run", folder / "runs" / "tiny_run")
    settings = ["adapter.rank=4", "adapter.alpha=8", "run.steps=30"]
    # The recipe is saved anew, so that its keys are those of this version.
    save_config(load_recipe("tiny", settings), folder / "runs" / "tiny_run" / "config.yaml")
    return folder / "runs" / "tiny_run"


@pytest.fixture(scope="session")
def base(run):
    return run.parents[1] / "checkpoints" / "tiny-NVFP4A16"


@pytest.fixture(scope="session")
def on_experts(tmp_path_factory):
    """A trained adapter on attention and experts of tiny_experts, beside checkpoints/tiny_experts-NVFP4A16."""
    folder = tmp_path_factory.mktemp("experts")
    quantize_checkpoint("tiny_experts", folder / "checkpoints" / "tiny_experts-NVFP4A16", rounding(device="cpu"))
    return shutil.copytree(DATA / "tiny_experts_run" / "adapter", folder / "adapter")


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return small_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="session", params=["none", "frozen", "trained"])
def made(request, bases, tmp_path_factory):
    """An adapter of each kind of start; of `none` it is as before qerl knew any."""
    folder = make_adapter(tmp_path_factory.mktemp("adapter") / "adapter", bases, request.param)
    return SimpleNamespace(kind=request.param, folder=folder)


@pytest.fixture(scope="session")
def frozen(bases, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("frozen") / "adapter", bases, "frozen")


@pytest.fixture(scope="session")
def trained(bases, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("trained") / "adapter", bases, "trained")
