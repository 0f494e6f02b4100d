"""Damaged run directories: each is repaired, or gives one error that says what to do."""

import json
import re
import shutil
from pathlib import Path

import pytest

from qerl.base.errors import ConfigError, DataError
from qerl.base.program import ROWS, rows_file
from qerl.config.recipe import load_config, save_config
from quantize.run import quantize_checkpoint
from tests.helpers.roundings import ROUNDING, rounding
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import resume, start
from training.run_dir.checkpoint import checkpoint_path
from training.run_dir.folder import new_run_dir

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(nvfp4_base, tmp_path_factory):
    return start(small_config(nvfp4_base, tmp_path_factory.mktemp("finished"), steps=4), "tiny").run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def unfinish(run_dir):
    shutil.rmtree(checkpoint_path(run_dir, 4))
    shutil.rmtree(run_dir / "adapter")


def test_an_incomplete_adapter_is_replaced_and_kept_aside(run_dir, finished):
    (run_dir / "adapter" / "adapter_model.safetensors").unlink()
    assert same_adapters(resume(run_dir).adapter, finished / "adapter")
    (aside,) = run_dir.glob("replaced-*")
    kept = {path.name for path in (aside / "adapter").iterdir()}
    assert {"adapter_config.json", "checksums.json"} <= kept
    assert "adapter_model.safetensors" not in kept


def test_a_file_with_the_name_of_the_adapter_is_kept_aside(run_dir, finished):
    shutil.rmtree(run_dir / "adapter")
    (run_dir / "adapter").write_text("mine")
    assert same_adapters(resume(run_dir).adapter, finished / "adapter")
    (aside,) = run_dir.glob("replaced-*")
    assert (aside / "adapter").read_text() == "mine"


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1, 0.2, 0.3, 0.6], "mean reward 0.100 in the first 1, 0.600 in the last; adapter in"),
        ([], r"its metrics are gone \(.*metrics\.jsonl holds no reward\); adapter in"),
        (None, r"its metrics are gone"),
    ],
)
def test_missing_metrics_are_not_shown_as_a_reward_of_zero(run_dir, rewards, said, caplog):
    metrics = run_dir / "metrics.jsonl"
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards or [], start=1)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rewards is None:
        metrics.unlink()
    with caplog.at_level("INFO"):
        resume(run_dir)
    assert re.search(f"finished 4 steps: {said}", caplog.text)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_run_json_is_named_and_written_again(run_dir, finished, text):
    unfinish(run_dir)
    (run_dir / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run\.json is damaged .*: delete it, and `qerl train --resume"):
        resume(run_dir)
    (run_dir / "run.json").unlink()
    assert numbers(resume(run_dir).run_dir) == numbers(finished)
    assert json.loads((run_dir / "run.json").read_text())["recipe"] == "run"


def test_another_scaling_in_the_recipe_is_refused(run_dir):
    """The tensors would fit, but act more strongly than in training."""
    unfinish(run_dir)
    config = load_config(run_dir / "config.yaml")
    save_config(
        config.model_copy(update={"adapter": config.adapter.model_copy(update={"alpha": 99})}),
        run_dir / "config.yaml",
    )
    with pytest.raises(ConfigError, match=r"was trained with alpha / rank 2 and would act with .*adapter\.alpha"):
        resume(run_dir)


def test_a_base_that_was_quantized_again_is_refused(base, tmp_path):
    """The adapter would be trained and used on other weights than before."""
    nvfp4 = tmp_path / "nvfp4"
    quantize_checkpoint(str(base), nvfp4, ROUNDING)
    run_dir = start(small_config(nvfp4, tmp_path, steps=3), "tiny").run_dir
    (run_dir / "checkpoints" / "step-000003").rename(tmp_path / "last")
    quantize_checkpoint(str(base), nvfp4, rounding(ignore=("re:.*mlp.*",), overwrite=True))
    with pytest.raises(ConfigError, match=r"other weights than when .* began .was it quantized again"):
        resume(run_dir)
    quantize_checkpoint(str(base), nvfp4, rounding(overwrite=True))
    assert resume(run_dir).steps == 3


def test_a_directory_that_holds_only_a_lock_counts_as_new(tmp_path):
    (tmp_path / ".lock").touch()
    assert new_run_dir(str(tmp_path), "tiny") == tmp_path


def test_a_directory_that_was_left_before_its_recipe_counts_as_new(tmp_path):
    for name in (ROWS, rows_file("a"), Path(rows_file("b-c")).with_suffix(".partial").name):
        (tmp_path / name).touch()
    assert new_run_dir(str(tmp_path), "tiny") == tmp_path
    (tmp_path / "given-rows-of-mine.txt").touch()
    with pytest.raises(ConfigError, match="already exists and is no run"):
        new_run_dir(str(tmp_path), "tiny")


def test_a_tilde_means_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_run_dir("~/runs/a", "tiny") == tmp_path / "runs" / "a"
