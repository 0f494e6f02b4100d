"""A run whose saved adapters lost data is noticed by whatever reads an adapter, not by --resume alone."""

import shutil
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import CHECKSUMS
from qerl.checkpoint.resolve import adapter_folder, resolve_model
from qerl.report.read import read_run
from tests.helpers.small_run import same_adapters, small_config
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def finished(nvfp4_base, tmp_path_factory):
    """A run of 4 steps with the checkpoints 2 and 4."""
    return start(small_config(nvfp4_base, tmp_path_factory.mktemp("finished"), steps=4), "tiny").run_dir


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_result_with_a_flipped_bit_is_passed_over_for_the_checkpoint_of_its_step(run, caplog, name):
    flip(run / "adapter" / name)
    assert resolve_model(str(run)).adapter == run / "checkpoints" / "step-000004"
    assert f"adapter is damaged ({name} does not match its checksum); checkpoints/step-000004 is taken" in caplog.text
    with pytest.raises(CheckpointError, match=rf"adapter is damaged \({name} does not match.*the run"):
        adapter_folder(str(run / "adapter"))


@pytest.mark.parametrize("damage", [lambda step: flip(step / WEIGHTS), lambda step: (step / CHECKSUMS).unlink()])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, caplog, damage):
    shutil.rmtree(run / "adapter")
    damage(run / "checkpoints" / "step-000004")
    assert resolve_model(str(run)).adapter == run / "checkpoints" / "step-000002"
    assert "step-000004 is damaged" in caplog.text


def test_without_a_whole_adapter_one_line_names_the_damage(run):
    for folder in ("adapter", "checkpoints/step-000002", "checkpoints/step-000004"):
        flip(run / folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"has no adapter left that is whole: adapter is .*step-000002 is"):
        resolve_model(str(run))


def test_the_report_names_what_is_damaged(run):
    flip(run / "checkpoints" / "step-000002" / WEIGHTS)
    assert (
        read_run(run).warnings[-1]["text"]
        == f"checkpoints/step-000002 is damaged: {WEIGHTS} does not match its checksum"
    )


def test_resuming_a_finished_run_replaces_a_damaged_result(run, finished):
    flip(run / "adapter" / WEIGHTS)
    assert same_adapters(resume(run).adapter, finished / "adapter")
    (aside,) = run.glob("replaced-*")
    assert (aside / "adapter" / WEIGHTS).is_file()


def test_an_adapter_that_another_program_saved_has_no_checksums_and_is_taken(run):
    (run / "adapter" / CHECKSUMS).unlink()
    assert adapter_folder(str(run)) == run / "adapter"
