"""What cannot be merged is refused before anything is written, and a merge that fails leaves old files alone."""

import json
import shutil
from pathlib import Path

import pytest

import quantize.export.run
import quantize.export.weights
from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.checkpoint.output import FILES, list_files, write_weights
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_factory import make_checkpoint


def refuse(*_):
    raise OSError(28, "No space left")


@pytest.mark.parametrize("to", ["bf16", "nvfp4", "adapter"])
def test_a_merge_that_fails_half_way_leaves_the_old_folder(run, tmp_path, monkeypatch, to):
    out = tmp_path / "out"
    out.mkdir()
    (out / "merge_report.json").write_text('{"to": "bf16"}')
    list_files(out)
    with monkeypatch.context() as patch:
        patch.setattr(quantize.export.run, "write_card", refuse)
        with pytest.raises(CheckpointError, match="free some space"):
            export(ExportOptions(str(run), to, out, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["merge_report.json", FILES]


def test_a_damaged_write_is_noticed(run, tmp_path, monkeypatch):
    def flipped(folder, groups, **options):
        size = write_weights(folder, groups, **options)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 64
        path.write_bytes(data)
        return size

    monkeypatch.setattr(quantize.export.weights, "write_weights", flipped)
    with pytest.raises(CheckpointError, match="does not pass its check"):
        export(ExportOptions(str(run), "bf16", tmp_path / "out"))
    assert not list(tmp_path.iterdir())


REFUSALS = {
    "no such adapter": ({"adapter": "./nowhere"}, "there is no folder ./nowhere"),
    "a model": ({"adapter": "tiny"}, "is a model, not an adapter"),
    "format": ({"to": "int4"}, "write adapter, bf16, nvfp4"),
    "dtype of a model": ({"dtype": "float32"}, "go with --to adapter"),
    "onto of an adapter": ({"to": "adapter", "onto": "original"}, "exact copy"),
    "onto what": ({"onto": "base"}, "write auto, trained, original"),
    "prompts": ({"prompts": Path("no.jsonl")}, "no.jsonl does not exist"),
    "prompts that are none": ({"prompts": Path(__file__)}, "write a path to .jsonl"),
    "count": ({"prompt_count": -1}, "at least 0"),
    "hub id": ({"push_to_hub": "my model"}, "write owner/name"),
    "other base": ({"model": "OTHER"}, "give the base that it was trained on"),
    "into the base": ({"out": "BASE"}, "model's own folder"),
    "device": ({"device": "tpu0"}, "write auto or cpu"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_mistakes_are_refused_before_anything_is_written(run, base, tmp_path, name):
    changes, expected_text = REFUSALS[name]
    if changes.get("model") == "OTHER":
        changes = {"model": str(make_checkpoint(tmp_path / "other", "qwen3"))}
    if changes.get("out") == "BASE":
        changes = {"out": base}
    before = sorted(path.name for path in tmp_path.iterdir()), sorted(path.name for path in base.iterdir())
    options = {"adapter": str(run), "to": "bf16", "out": tmp_path / "out", **changes}
    with pytest.raises((ConfigError, CheckpointError, DataError), match=expected_text):
        export(ExportOptions(**options))
    assert before == (sorted(path.name for path in tmp_path.iterdir()), sorted(path.name for path in base.iterdir()))


def test_another_model_under_the_originals_name_is_refused(run, base, tmp_path):
    other = make_checkpoint(tmp_path / "other", "qwen3")
    for name in ("checkpoints", "runs"):
        shutil.copytree(run.parents[1] / name, tmp_path / name, ignore=shutil.ignore_patterns("merged*", "exported"))
    path = tmp_path / "checkpoints" / "tiny-NVFP4A16" / "quantize_report.json"
    report = json.loads(path.read_text())
    options = ExportOptions(
        str(tmp_path / "runs" / "tiny_run" / "adapter"), "nvfp4", tmp_path / "out", model=str(path.parent)
    )
    path.write_text(json.dumps({**report, "source": str(other)}))
    with pytest.raises(CheckpointError, match=r"is not the model that|give the base"):
        export(options)
    path.write_text(json.dumps({**report, "method": "awq"}))
    merged = export(ExportOptions(**{**vars(options), "prompt_count": 0}))
    assert "quantized by awq" in merged.warnings()[0]
    assert merged.onto == str(path.parent)
