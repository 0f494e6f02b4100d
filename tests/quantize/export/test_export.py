"""`qerl export`, and what the other commands say of runs that train whole weights. One run of two steps is shared."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import quantize.export.run
import quantize.export.weights
from eval.run import run_checkpoints, run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint import folder as sealed
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import adapter_folder, resolve_model
from qerl.checkpoint.shards import read_json
from qerl.checkpoint.verify import FailedCheck
from qerl.formats import BF16
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_tensors import same_tensors, tensors_in
from tests.helpers.killed import killed_in
from tests.helpers.small_run import small_config
from training.run import start

QAT = (
    "qat.mode=weights", "qat.train_norms=true", "qat.targets=['re:.*mlp.*']", "run.save_every=1",
    "run.keep_checkpoints=9", "noise.enabled=false", "optim.learning_rate=1e-3",
)  # fmt: skip
LAST = "checkpoints/step-000002/weights"


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    torch.set_num_threads(1)
    return start(small_config(base, tmp_path_factory.mktemp("qat"), *QAT, steps=2), "qat").run_dir


@pytest.fixture
def run(finished, tmp_path):
    """A copy, to be changed."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def packed(finished, tmp_path_factory):
    return export(ExportOptions(str(finished), out=tmp_path_factory.mktemp("out") / "packed"))


def test_the_export_has_the_bytes_of_the_run_s_model(finished, packed):
    assert same_tensors(packed.out, finished / "model")
    assert read_json(packed.out / "config.json") == read_json(finished / "model" / "config.json")
    assert sealed.damage_of(packed.out, {"config.json", "tokenizer.json", "README.md", "export_report.json"}) is None
    assert (packed.step, packed.linears, packed.to) == (2, 6, "nvfp4")
    assert packed.lowest_sqnr_db > 15


def test_its_card_says_what_it_is(packed):
    text = (packed.out / "README.md").read_text()
    assert "packed as the engine holds them" in text
    assert "masters: " in text
    assert "adapter" not in text
    assert "vllm serve" in text


def test_an_earlier_step_gives_another_model(finished, packed, tmp_path):
    report = export(ExportOptions(str(finished), out=tmp_path / "first", step=1))
    assert report.step == 1
    assert not same_tensors(report.out, packed.out)


def test_bf16_holds_the_masters_rounded(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = export(ExportOptions(str(finished), "bf16"))
    assert str(report.out) == "exported/run-bf16"
    found, masters = tensors_in(report.out), tensors_in(finished / LAST)
    assert len(masters) == 10
    assert all(torch.equal(found[name], master.bfloat16()) for name, master in masters.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    frozen = "model.layers.0.self_attn.q_proj"
    opened = load_model(finished / "model", "nvfp4").get_submodule(frozen)
    assert torch.equal(found[f"{frozen}.weight"], opened.dense(torch.bfloat16))
    reopened = load_model(report.out, BF16.name).state_dict()
    assert all(torch.equal(reopened[name], found[name].to(reopened[name].dtype)) for name in masters)
    assert "the masters rounded to bfloat16, which is not the model" in (report.out / "README.md").read_text()


def graded(model, rows, out):
    asked = EvalSettings("arith", data=str(rows), model=str(model), max_new_tokens=8, engine="transformers", out=out)
    run_eval(asked)
    lines = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    return [line["completion"] for line in lines]


def test_an_evaluation_of_the_export_is_that_of_the_run(finished, packed, tmp_path):
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(4)))
    assert graded(packed.out, rows, tmp_path / "first") == graded(finished, rows, tmp_path / "second")
    ref = resolve_model(str(finished))
    assert (ref.kind, ref.base, ref.adapter, ref.run) == ("run", str(finished / "model"), None, finished)


def test_a_run_that_has_not_finished_is_exported_before_it_is_used(run):
    shutil.rmtree(run / "model")
    with pytest.raises(CheckpointError, match=r"has not finished.* `qerl export --run .*/run`"):
        resolve_model(str(run))
    assert export(ExportOptions(str(run), out=run.parent / "out")).step == 2


def test_what_needs_an_adapter_says_to_export(finished):
    with pytest.raises(CheckpointError, match=r"has no adapter: write `qerl export --run "):
        adapter_folder(str(finished))
    settings = EvalSettings("arith", run=finished, checkpoints="all", engine="transformers")
    with pytest.raises(CheckpointError, match=r"write `qerl export --run .* --step STEP`"):
        run_checkpoints(settings)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_unless_it_is_named(run, caplog):
    flip(run / LAST / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint left that is whole"):
        export(ExportOptions(str(run), out=run.parent / "out", step=2))
    assert export(ExportOptions(str(run), out=run.parent / "out")).step == 1
    assert "step-000002 is damaged: weights/model.safetensors does not match" in caplog.text


def only_its_base(run):
    aside = (run / "base").rename(run.with_name("base"))
    shutil.rmtree(run)
    aside.rename(run)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), {}, "has saved no weights yet"),
        (lambda run: flip(run / "base/model.safetensors"), {}, r"base.*is damaged .* put its files back"),
        (lambda run: flip(run / "model/model.safetensors"), {"step": 9}, r"--step 9: .* give one of 1, 2$"),
        (only_its_base, {}, "is a model, not an adapter"),
        (shutil.rmtree, {}, "there is no folder"),
        (lambda run: None, {"to": "fp3"}, "--to 'fp3' is not known: write "),
    ],
    ids=["no weights", "base", "step", "no run", "nothing", "to"],
)
def test_what_cannot_be_exported(run, change, options, message):
    change(run)
    with pytest.raises((CheckpointError, ConfigError), match=message) as refused:
        export(ExportOptions(str(run), out=run.parent / "out", **options))
    assert "\n" not in str(refused.value)
    assert not (run.parent / "out").exists()


def test_a_folder_is_replaced_only_if_it_is_asked_for_and_not_in_the_run(finished, packed, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(packed.out, out)
    with pytest.raises(CheckpointError, match="exists: write `--overwrite`"):
        export(ExportOptions(str(finished), out=out))
    export(ExportOptions(str(finished), out=out, step=1, overwrite=True))
    assert not same_tensors(out, packed.out)
    with pytest.raises(CheckpointError, match="holds or lies in the model's own folder"):
        export(ExportOptions(str(finished), out=finished / "base" / "x"))


def test_a_killed_export_leaves_nothing_that_looks_whole(finished, tmp_path):
    with killed_in(quantize.export.weights, "check_written", call=1):
        export(ExportOptions(str(finished), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export(ExportOptions(str(finished), out=tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_bit_that_is_lost_in_writing_is_found(finished, tmp_path, monkeypatch):
    original = quantize.export.run.write_trained

    def careless(masters, folder, *rest):
        size = original(masters, folder, *rest)
        flip(folder / "model.safetensors")
        return size

    monkeypatch.setattr(quantize.export.run, "write_trained", careless)
    with pytest.raises(FailedCheck, match="is not the tensor that was to be written"):
        export(ExportOptions(str(finished), out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_push_follows_the_export_and_is_checked_before_it(finished, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        quantize.export.run, "check_push", lambda repo: seen.append((repo, (tmp_path / "out").exists()))
    )
    monkeypatch.setattr(quantize.export.run, "push", lambda *given: seen.append(given) or "the hub")
    options = ExportOptions(str(finished), out=tmp_path / "out", push_to_hub="me/model")
    report = export(options)
    assert seen == [("me/model", False), (report.out, "me/model", True)]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="is no hub id"):
        export(replace(options, push_to_hub="model", out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
