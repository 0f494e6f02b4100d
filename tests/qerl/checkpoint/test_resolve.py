"""What a --model is, decided from its files alone."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from checkpoint_factory import fake_checkpoint

from qerl.checkpoint import hub
from qerl.checkpoint import resolve as checkpoint
from qerl.checkpoint.kinds import kind_of
from qerl.checkpoint.resolve import (
    ModelRef,
    default_quantized_dir,
    describe,
    model_under,
    newest_model,
    resolve_model,
)
from qerl.errors import CheckpointError

NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": None}},
}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_base(folder="models/Small-1B"):
    return fake_checkpoint(folder)


def make_nvfp4(folder="checkpoints/Small-1B-NVFP4A16", source=None):
    path = fake_checkpoint(folder, quantization_config=NVFP4)
    if source is not None:
        (path / "quantize_report.json").write_text(json.dumps({"source": str(source)}))
    return path


def make_adapter(folder, base):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def make_run(tmp_path, base, name="r1", model_format="nvfp4", steps=(5, 40)):
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"model:\n  base: {base}\n  format: {model_format}\n")
    (run / "metrics.jsonl").write_text("")
    for step in steps:
        make_adapter(run / "checkpoints" / f"step-{step:06d}", base)
    return run


# --- one of each kind


def test_a_16_bit_model():
    base = make_base()
    assert resolve_model("models/Small-1B") == ModelRef("base16", base, "models/Small-1B", None, None, "bf16")


def test_an_nvfp4_folder():
    folder = make_nvfp4()
    for load in ("auto", "nvfp4"):
        found = resolve_model(str(folder), load)
        assert found == ModelRef("nvfp4", folder, str(folder), None, None, "nvfp4")


def test_an_adapter_folder_brings_its_base(tmp_path):
    base = make_nvfp4()
    folder = make_adapter(tmp_path / "my adapter", base)
    assert resolve_model(str(folder)) == ModelRef("adapter", folder, str(base), folder, None, "nvfp4")


def test_a_run_brings_its_base_and_its_last_adapter(tmp_path):
    base = make_nvfp4()
    run = make_run(tmp_path, base, steps=(5, 40, 100))
    last = run / "checkpoints" / "step-000100"
    assert resolve_model(str(run)) == ModelRef("run", run, str(base), last, run, "nvfp4")


def test_the_final_adapter_of_a_run_wins_over_its_checkpoints(tmp_path):
    run = make_run(tmp_path, make_nvfp4())
    final = make_adapter(run / "adapter", "whatever")
    assert resolve_model(str(run)).adapter == final


def test_steps_count_as_numbers_and_unfinished_checkpoints_do_not_count(tmp_path):
    run = make_run(tmp_path, make_nvfp4(), steps=())
    for name in ("step-9", "step-10", ".step-000011.partial"):
        make_adapter(run / "checkpoints" / name, "base")
    assert resolve_model(str(run)).adapter.name == "step-10"


def test_the_embedded_model_is_a_word_and_not_a_folder(tmp_path):
    make_nvfp4("tiny")
    found = resolve_model("tiny")
    assert (found.kind, found.format, found.base) == ("base16", "bf16", str(checkpoint.TINY_FOLDER))
    assert resolve_model("./tiny").kind == "nvfp4"


def test_an_adapter_can_be_given_beside_the_model(tmp_path):
    base, nvfp4 = make_base(), make_nvfp4()
    run = make_run(tmp_path, nvfp4)
    folder = make_adapter(tmp_path / "other", base)
    assert resolve_model(str(base), adapter=str(folder)).adapter == folder
    assert resolve_model(str(base), adapter=str(run)).adapter == run / "checkpoints" / "step-000040"
    assert resolve_model(str(run), adapter=str(folder)).adapter == folder
    with pytest.raises(CheckpointError, match="is a model, not an adapter"):
        resolve_model(str(nvfp4), adapter=str(base))


# --- load=


def test_load_nvfp4_takes_what_quantize_made_of_a_16_bit_model():
    base = make_base()
    folder = make_nvfp4(source=base.resolve())
    assert resolve_model(str(base), "nvfp4").base == str(folder)
    assert resolve_model(str(base), "auto").format == "bf16"


def test_load_nvfp4_without_it_says_what_to_type():
    make_base()
    with pytest.raises(CheckpointError, match=r"run `qerl quantize --model models/Small-1B`"):
        resolve_model("models/Small-1B", "nvfp4")
    with pytest.raises(CheckpointError, match=r"run `qerl quantize --model tiny`"):
        resolve_model("tiny", "nvfp4")


def test_load_nvfp4_does_not_take_another_model_of_the_same_name(tmp_path):
    base, other = make_base(), make_base("elsewhere/Small-1B")
    make_nvfp4(source=other.resolve())
    with pytest.raises(CheckpointError, match=r"was made from .*elsewhere/Small-1B, not from models/Small-1B"):
        resolve_model(str(base), "nvfp4")
    shutil.rmtree(other)  # moved to models/, so the report's folder is gone and the name has to do
    assert resolve_model(str(base), "nvfp4").kind == "nvfp4"


def test_load_bf16_takes_the_model_that_the_report_names():
    base = make_base()
    folder = make_nvfp4(source=base.resolve())
    found = resolve_model(str(folder), "bf16")
    assert (found.base, found.format, found.path) == (str(base.resolve()), "bf16", folder)


def test_load_bf16_of_an_nvfp4_folder_without_report_says_what_to_type():
    make_nvfp4()
    with pytest.raises(CheckpointError, match=r"holds NVFP4 weights only.*--load nvfp4"):
        resolve_model("checkpoints/Small-1B-NVFP4A16", "bf16")


def test_a_run_on_a_16_bit_model_name_loads_in_its_recipes_format(tmp_path):
    base = make_base()
    nvfp4 = make_nvfp4(source=base.resolve())
    run = make_run(tmp_path, base, model_format="nvfp4")
    assert resolve_model(str(run)).base == str(nvfp4)
    assert resolve_model(str(run), "bf16").base == str(base)
    twin = make_run(tmp_path, base, "r2", model_format="bf16")
    assert resolve_model(str(twin)).base == str(base)
    assert resolve_model(str(twin), "nvfp4").base == str(nvfp4)


def test_a_runs_relative_base_is_found_from_elsewhere(tmp_path, monkeypatch):
    make_nvfp4()
    run = make_run(tmp_path, "checkpoints/Small-1B-NVFP4A16")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_model(str(run)).base == str(tmp_path / "checkpoints/Small-1B-NVFP4A16")


def test_a_runs_quantized_base_is_found_from_elsewhere(tmp_path, monkeypatch):
    base = make_base()
    nvfp4 = make_nvfp4(source=base.resolve()).resolve()
    run = make_run(tmp_path, base.resolve(), model_format="nvfp4")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_model(str(run)).base == str(nvfp4)


def test_the_base_beside_a_run_comes_before_one_of_the_same_name_here(tmp_path, monkeypatch):
    base = make_base()
    nvfp4 = make_nvfp4(source=base.resolve()).resolve()
    run = make_run(tmp_path, "checkpoints/Small-1B-NVFP4A16")
    twin = make_run(tmp_path, base.resolve(), "r2", model_format="nvfp4")
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    make_nvfp4(source=base)
    assert resolve_model(str(run)).base == str(nvfp4)
    assert resolve_model(str(twin)).base == str(nvfp4)


def test_load_has_three_values():
    with pytest.raises(CheckpointError, match="write auto, nvfp4 or bf16"):
        resolve_model(str(make_base()), "fp8")


# --- what cannot be used


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("no/such/folder", r"there is no folder no/such/folder \(no/ is not there either\): give an existing folder"),
        ("typo", "neither a folder here nor a hub id"),
        ("emty", r"neither a folder here nor a hub id \(did you mean empty\?\)"),
        ("./missing", r"there is no folder ./missing \(beside it: empty\): give an existing folder"),
        ("./emtpy", r"there is no folder ./emtpy \(did you mean empty\?\): give"),
        ("./EMPTY", r"there is no folder ./EMPTY \(did you mean empty\?\): give"),
        ("../nowhere/x", "there is no folder ../nowhere/x"),
        ("~/no-such-model", "there is no folder ~/no-such-model"),
        ("/no-such-model", "there is no folder /no-such-model"),
        ("a file", "is a file: give the folder"),
        ("empty", "has no config.json, adapter_config.json"),
    ],
)
def test_paths_that_are_no_model(tmp_path, ref, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("x")
    with pytest.raises(CheckpointError, match=message):
        resolve_model(ref)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "already quantized as gptq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "already quantized as modelopt"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"compressed-tensors \(pack-quantized\)",
        ),
        (
            {**NVFP4, "config_groups": {"g": {"input_activations": {"num_bits": 4}}}},
            "quantizes activations too .NVFP4 W4A4.",
        ),
        ({**NVFP4, "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}}, "with {'group_size': 32}"),
        (
            {**NVFP4, "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            "'num_bits': 8, 'type': 'int'",
        ),
        ({**NVFP4, "config_groups": None}, "quantization_config that cannot be read"),
        ({**NVFP4, "config_groups": [1]}, "quantization_config that cannot be read"),
        ("nvfp4", "quantization_config that cannot be read"),
    ],
)
def test_other_quantizations_are_named(quantization, message):
    folder = fake_checkpoint("m", quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        kind_of(folder)


def test_missing_weights_are_noticed_when_the_model_is_resolved():
    folder = make_base()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only as pickled files"):
        resolve_model(str(folder))


def test_a_run_without_a_checkpoint_yet(tmp_path):
    run = make_run(tmp_path, make_nvfp4(), steps=())
    with pytest.raises(CheckpointError, match="has saved no adapter yet"):
        resolve_model(str(run))


@pytest.mark.parametrize("text", ["model: [", "model: 3", "{}", "model:\n  format: nvfp4\n"])
def test_a_run_with_a_damaged_config(tmp_path, text):
    run = make_run(tmp_path, make_nvfp4())
    (run / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml names no model\.base"):
        resolve_model(str(run))


def test_adapters_that_are_incomplete_or_stacked(tmp_path):
    base = make_base()
    first = make_adapter(tmp_path / "first", base)
    with pytest.raises(CheckpointError, match="is itself an adapter"):
        resolve_model(str(make_adapter(tmp_path / "second", first)))
    (first / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        resolve_model(str(first))
    (first / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"names no base: write `--model BASE --adapter"):
        resolve_model(str(first))


def test_an_adapter_that_names_itself_as_base_is_refused(tmp_path, monkeypatch):
    adapter = make_adapter(tmp_path / "mine", tmp_path / "mine")
    words = r"mine/adapter_config\.json names .*, which is the adapter itself, as its base: write .*--model BASE"
    with pytest.raises(CheckpointError, match=words):
        resolve_model(str(adapter))
    with pytest.raises(CheckpointError, match=words):
        model_under(str(adapter))
    make_adapter(tmp_path / "here", ".")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"names \., which is the adapter itself"):
        resolve_model(".")


def test_adapters_and_runs_that_name_one_another_are_refused(tmp_path):
    first = make_adapter(tmp_path / "first", tmp_path / "second")
    make_adapter(tmp_path / "second", tmp_path / "third")
    make_adapter(tmp_path / "third", first)
    words = "third/adapter_config.json names .*first, which rests on it, as its base: write"
    with pytest.raises(CheckpointError, match=words):
        resolve_model(str(first))
    with pytest.raises(CheckpointError, match=words):
        model_under(str(first))
    run = make_run(tmp_path, tmp_path / "runs" / "r1")
    with pytest.raises(CheckpointError, match=r"r1/config\.yaml names .*r1, which is the run itself, as its base"):
        resolve_model(str(run))


def test_an_adapter_of_the_hub_that_names_itself_is_refused(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = hub_snapshot(tmp_path / "cache", "some/adapter", lambda folder: make_adapter(folder, "some/adapter"))
    (snapshot / "config.json").write_text("{}")  # by which it is found in the cache
    with pytest.raises(CheckpointError, match=r"is itself an adapter .some/adapter."):
        resolve_model("some/adapter")


def test_a_run_that_began_from_an_adapter_has_that_one_s_base(tmp_path):
    """Its own adapter holds what it began from."""
    base = make_nvfp4()
    first = make_run(tmp_path, base, "first")
    for name, start in (("second", first), ("third", make_adapter(tmp_path / "loose", base))):
        found = resolve_model(str(make_run(tmp_path, start, name)))
        assert found.base.endswith(str(base))
        assert found.format == "nvfp4"
        assert found.adapter == tmp_path / "runs" / name / "checkpoints" / "step-000040"
        assert found.run == found.path == tmp_path / "runs" / name


def test_the_run_that_a_run_began_from_is_found_from_elsewhere(tmp_path, monkeypatch):
    base = make_nvfp4()
    make_run(tmp_path, base, "first")
    second = make_run(tmp_path, "runs/first", "second")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_model(str(second)).base == str(tmp_path / base)


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(CheckpointError, match="some/model is no folder here, and the hub cannot be reached"):
        resolve_model("some/model")


def test_a_mistyped_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    """runs/dnoe has the form of a hub id, and runs/ is a folder here."""
    monkeypatch.setattr(hub, "reachable", lambda: False)
    make_run(tmp_path, make_nvfp4(), name="done")
    with pytest.raises(CheckpointError, match=r"there is no folder runs/dnoe \(did you mean runs/done\?\), and the"):
        resolve_model("runs/dnoe")
    with pytest.raises(CheckpointError, match=r"no folder checkpoints/x \(beside it: checkpoints/Small-1B-NVFP4A16\)"):
        resolve_model("checkpoints/x")
    with pytest.raises(CheckpointError, match=r"no folder runs/dnoe"):
        resolve_model(str(make_base()), adapter="runs/dnoe")


def test_many_neighbours_are_counted(tmp_path):
    for name in "abcdef":
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / ".hidden").mkdir()
    with pytest.raises(CheckpointError, match=r"\(beside it: runs/a, runs/b, runs/c and 3 others\)"):
        resolve_model("./runs/zzz")


def hub_snapshot(cache, repo, fill):
    """A model in the hub's cache as its client leaves it there."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123456789abcdef"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123456789abcdef")
    fill(snapshot)
    return snapshot


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = hub_snapshot(tmp_path / "cache", "some/model", fake_checkpoint)
    assert resolve_model("some/model") == ModelRef("base16", snapshot, "some/model", None, None, "bf16")
    assert hub.download_model("some/model") == snapshot
    with pytest.raises(CheckpointError, match="run `qerl quantize --model some/model`"):
        resolve_model("some/model", "nvfp4")


def test_a_hub_id_whose_owner_is_a_folder_here_is_still_one(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = hub_snapshot(tmp_path / "cache", "some/model", fake_checkpoint)
    (tmp_path / "some" / "other").mkdir(parents=True)
    assert resolve_model("some/model").path == snapshot
    with pytest.raises(CheckpointError, match=r"no folder some/modle \(beside it: some/other\), and the hub cannot be"):
        resolve_model("some/modle")


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("a/b/c", False),
        ("../x", False),
        ("/etc/x", False),
        ("name", False),
        (".hidden/x", False),
        ("models/Small-1B", False),  # a folder here
    ],
)
def test_what_has_the_form_of_a_hub_id(ref, expected):
    make_base()
    assert hub.is_hub_id(ref) is expected


# --- defaults


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct-NVFP4A16"),
        ("models/Small-1B", "Small-1B-NVFP4A16"),
        ("models/Small-1B/", "Small-1B-NVFP4A16"),
        ("./models/../models/Small-1B", "Small-1B-NVFP4A16"),
        ("tiny", "tiny-NVFP4A16"),
        (str(checkpoint.TINY_FOLDER), "tiny-NVFP4A16"),
    ],
)
def test_default_folder_of_a_quantized_model(model, name):
    make_base()
    assert str(default_quantized_dir(model)) == f"checkpoints/{name}"


def touch(path, when):
    os.utime(path, (when, when))


def test_newest_is_by_time_and_passes_over_what_cannot_be_used(tmp_path, caplog):
    assert newest_model() is None
    folder = make_nvfp4()
    run, young = make_run(tmp_path, folder), make_run(tmp_path, folder, "r2", steps=())
    hidden = make_nvfp4("checkpoints/.Small-1B-NVFP4A16.partial")
    touch(folder / "config.json", 100)
    touch(run / "metrics.jsonl", 200)
    touch(young / "metrics.jsonl", 300)
    touch(hidden / "config.json", 400)
    assert newest_model().run.name == "r1"
    assert "passing over runs/r2" in caplog.text
    touch(folder / "config.json", 250)
    assert newest_model().kind == "nvfp4"


def test_descriptions_name_the_base_and_the_adapter(tmp_path):
    folder = make_nvfp4()
    assert describe(resolve_model(str(folder))) == "NVFP4 checkpoint checkpoints/Small-1B-NVFP4A16"
    run = make_run(tmp_path, folder)
    assert describe(resolve_model(str(run))) == (
        f"run {run}, nvfp4 base checkpoints/Small-1B-NVFP4A16, adapter {run}/checkpoints/step-000040"
    )


def test_importing_loads_nothing_heavy():
    heavy = {"torch", "transformers", "huggingface_hub", "yaml"}
    code = f"import sys, qerl.checkpoint.resolve; print(*{heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("named", [None, "", 7, ["a"]], ids=str)
def test_an_adapter_that_names_no_base_says_so(named, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    with pytest.raises(CheckpointError, match="names no base: write `--model BASE"):
        resolve_model(str(tmp_path))


def test_an_adapter_away_from_its_base_says_how_to_name_the_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "checkpoints/gone"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"an adapter of checkpoints/gone, which is not here: .*--model BASE"):
        resolve_model(str(tmp_path))
