"""adapter/ and best/ of a run directory, made of checkpoint folders that are as good as real ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.checkpoint.folder import adapter_damage, seal
from training.run_dir.checkpoint import FILES, checkpoint_path
from training.run_dir.result import settle_best, settle_result
from training.run_dir.verdict import Best


@pytest.fixture
def run_dir(tmp_path):
    for step in (2, 4):
        folder = checkpoint_path(tmp_path, step)
        folder.mkdir(parents=True)
        for name in FILES:
            (folder / name).write_text("{}")
        save_file({"a": torch.full((2,), float(step))}, folder / "adapter_model.safetensors")
        seal(folder)
    return tmp_path


def step_of(folder):
    return load_file(folder / "adapter_model.safetensors")["a"][0].item()


def test_the_result_is_that_of_the_last_step_and_an_earlier_one_is_moved_aside(run_dir):
    assert settle_result(run_dir, 2) == run_dir / "adapter"
    assert (step_of(run_dir / "adapter"), adapter_damage(run_dir / "adapter")) == (2, None)
    settle_result(run_dir, 4)
    (aside,) = run_dir.glob("replaced-*")
    assert (step_of(run_dir / "adapter"), step_of(aside / "adapter")) == (4, 2)
    settle_result(run_dir, 4)
    assert len(list(run_dir.glob("replaced-*"))) == 1


def test_best_follows_the_best_validation(run_dir):
    assert settle_best(run_dir, None) is None
    assert settle_best(run_dir, Best(2, "accuracy", 0.5)) == run_dir / "best"
    assert step_of(run_dir / "best") == 2
    (run_dir / "best" / "adapter_model.safetensors").write_bytes(b"")
    settle_best(run_dir, Best(2, "accuracy", 0.5))
    assert step_of(run_dir / "best") == 2  # a damaged one is made again
    settle_best(run_dir, Best(4, "accuracy", 0.6))
    assert step_of(run_dir / "best") == 4
    assert json.loads((run_dir / "best" / "validation.json").read_text())["value"] == 0.6
    assert [path.name for path in run_dir.iterdir() if path.name.startswith((".", "replaced"))] == []


def test_a_best_of_steps_that_the_run_gave_up_is_moved_aside(run_dir, caplog):
    settle_best(run_dir, Best(4, "accuracy", 0.6))
    assert settle_best(run_dir, Best(1, "accuracy", 0.4)) is None  # whose checkpoint was not kept
    (aside,) = run_dir.glob("replaced-*")
    assert not (run_dir / "best").exists()
    assert step_of(aside / "best") == 4
    assert "best is not of the best validation that the run has now" in caplog.text


def test_a_best_that_does_not_fit_on_the_disk_is_only_a_warning(run_dir, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.run_dir.result.shutil.copy", full)
    assert settle_best(run_dir, Best(2, "accuracy", 0.5)) is None
    assert "best could not be written (No space left on device): take" in caplog.text
