"""Damaged runs and adapters: what can be repaired is, and the rest is one error that says what to do."""

import json
import re
import shutil
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.base.program import ROWS, rows_file
from qerl.checkpoint.folder import CHECKSUMS
from qerl.checkpoint.resolve import adapter_folder, resolve_model
from qerl.report.read import read_run
from quantize.run import quantize_checkpoint
from tests.helpers.roundings import ROUNDING, rounding
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import resume, start
from training.run_dir.folder import new_run_dir

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of a run of 6 steps with the checkpoints 4 and 6."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_result_with_a_flipped_bit_is_passed_over_for_the_checkpoint_of_its_step(run, caplog, name):
    flip(run / "adapter" / name)
    assert resolve_model(str(run)).adapter == run / "checkpoints" / "step-000006"
    assert f"adapter is damaged and passed over: {name} does not match its checksum" in caplog.text
    with pytest.raises(CheckpointError, match=rf"adapter is damaged \({name} does not match.*the run"):
        adapter_folder(str(run / "adapter"))


@pytest.mark.parametrize("damage", [lambda step: flip(step / WEIGHTS), lambda step: (step / CHECKSUMS).unlink()])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_reported(run, caplog, damage):
    shutil.rmtree(run / "adapter")
    damage(run / "checkpoints" / "step-000006")
    assert resolve_model(str(run)).adapter == run / "checkpoints" / "step-000004"
    assert "step-000006 is damaged" in caplog.text
    assert read_run(run).warnings[-1]["text"].startswith("checkpoints/step-000006 is damaged: ")


def test_without_a_whole_adapter_each_damage_is_named(run, caplog):
    for folder in ("adapter", "checkpoints/step-000004", "checkpoints/step-000006"):
        flip(run / folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="has no adapter left that is whole"):
        resolve_model(str(run))
    assert all(f"{folder} is damaged" in caplog.text for folder in ("adapter", "step-000004", "step-000006"))


def test_an_adapter_that_another_program_saved_has_no_checksums_and_is_taken(run):
    (run / "adapter" / CHECKSUMS).unlink()
    assert adapter_folder(str(run)) == run / "adapter"


def a_file(adapter):
    shutil.rmtree(adapter)
    adapter.write_text("mine")


@pytest.mark.parametrize(
    "damage", [lambda adapter: flip(adapter / WEIGHTS), lambda adapter: (adapter / WEIGHTS).unlink(), a_file]
)
def test_resuming_a_finished_run_replaces_a_damaged_result_and_keeps_it_aside(run, whole_run, damage):
    damage(run / "adapter")
    assert same_adapters(resume(run).adapter, whole_run / "adapter")
    (aside,) = run.glob("replaced-*")
    kept = aside / "adapter"
    assert kept.read_text() == "mine" if damage is a_file else (kept / CONFIG).is_file()


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "mean reward 0.100 in the first step, 0.600 in the last; adapter in"),
        ([None] * 6, "no completion had a reward, since every reward function returned None; adapter in"),
        ([], r"its metrics are gone \(.*metrics\.jsonl holds no reward\); adapter in"),
        (None, r"its metrics are gone"),
    ],
)
def test_missing_metrics_are_not_shown_as_a_reward_of_zero(run, rewards, said, caplog):
    metrics = run / "metrics.jsonl"
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards or [], start=1)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rewards is None:
        metrics.unlink()
    with caplog.at_level("INFO"):
        resume(run)
    assert re.search(f"finished 6 steps: {said}", caplog.text)


def test_a_damaged_run_json_is_named_and_written_again(run, whole_run):
    for folder in ("adapter", "checkpoints/step-000006"):
        shutil.rmtree(run / folder)
    for text in ("", "{", "[]"):
        (run / "run.json").write_text(text)
        with pytest.raises(DataError, match=r"run\.json is damaged .*: delete it, and `qerl train --resume"):
            resume(run)
    (run / "run.json").unlink()
    assert numbers(resume(run).run_dir) == numbers(whole_run)
    assert json.loads((run / "run.json").read_text())["recipe"] == "run"


def test_a_base_that_was_quantized_again_is_refused(base, tmp_path):
    """The adapter would be trained and used on other weights than before."""
    nvfp4 = tmp_path / "nvfp4"
    quantize_checkpoint(str(base), nvfp4, ROUNDING)
    run_dir = start(small_config(nvfp4, tmp_path, "noise.enabled=false", steps=1), "tiny").run_dir
    quantize_checkpoint(str(base), nvfp4, rounding(ignore=("re:.*mlp.*",), overwrite=True))
    with pytest.raises(ConfigError, match=r"other weights than when .* began .was it quantized again"):
        resume(run_dir, steps=2)
    quantize_checkpoint(str(base), nvfp4, rounding(overwrite=True))
    assert resume(run_dir, steps=2).steps == 2


def test_a_directory_that_was_left_before_its_recipe_counts_as_new(monkeypatch, tmp_path):
    for name in (".lock", ROWS, rows_file("a"), Path(rows_file("b-c")).with_suffix(".partial").name):
        (tmp_path / name).touch()
    assert new_run_dir(str(tmp_path), "tiny") == tmp_path
    (tmp_path / "given-rows-of-mine.txt").touch()
    with pytest.raises(ConfigError, match="already exists and is no run"):
        new_run_dir(str(tmp_path), "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_run_dir("~/runs/a", "tiny") == tmp_path / "runs" / "a"
