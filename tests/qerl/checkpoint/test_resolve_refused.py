"""What cannot be a --model: each mistake gives one clear error."""

import json

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint import hub
from qerl.checkpoint.folder import kind_of
from qerl.checkpoint.resolve import model_under, resolve_model
from tests.helpers.checkpoint_factory import fake_checkpoint
from tests.helpers.model_folders import DYNAMIC, NVFP4, hub_snapshot, make_adapter, make_base, make_nvfp4, make_run


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
def test_paths_that_are_no_model_are_refused(tmp_path, ref, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("x")
    with pytest.raises(CheckpointError, match=message):
        resolve_model(ref)


ROUNDS = "in a way that qerl does not compute"
UNREADABLE = "quantization_config that cannot be read"


def groups(**named):
    return {**NVFP4, "config_groups": named}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "already quantized as gptq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "by ModelOpt as NVFP4_AWQ, and qerl reads NVFP4, "),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "as MIXED_PRECISION, and"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token"}, "_PER_TOKEN, and qerl reads"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "quantized_layers": [1]}, "cannot be read"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors \(pack-quantized\)"),
        (groups(g={"input_activations": {"num_bits": 4}}), f"quantizes activations {ROUNDS}"),
        (groups(a={"input_activations": DYNAMIC}, b={"input_activations": None}), ROUNDS),
        (groups(a={"input_activations": {**DYNAMIC, "symmetric": False}}), ROUNDS),
        (groups(g={"weights": {"num_bits": 4, "group_size": 32}}), "with {'group_size': 32}"),
        (groups(g={"weights": {"num_bits": 8, "type": "int"}}), "'num_bits': 8, 'type': 'int'"),
        *(({**NVFP4, "config_groups": None}, UNREADABLE), ({**NVFP4, "config_groups": [1]}, UNREADABLE)),
        ("nvfp4", UNREADABLE),
    ],
)
def test_other_quantizations_are_named(quantization, message):
    folder = fake_checkpoint("m", quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        kind_of(folder)


def test_missing_weights_are_noticed_when_the_model_is_resolved(tmp_path):
    folder = make_base()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only as pickled files"):
        resolve_model(str(folder))
    run = make_run(tmp_path, make_nvfp4(), steps=())
    with pytest.raises(CheckpointError, match="has saved no adapter yet"):
        resolve_model(str(run))


@pytest.mark.parametrize("text", ["model: [", "model: 3", "{}", "model:\n  format: nvfp4\n"])
def test_a_run_with_a_damaged_config_is_refused(tmp_path, text):
    run = make_run(tmp_path, make_nvfp4())
    (run / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml (names no model\.base|cannot be read)"):
        resolve_model(str(run))


def test_incomplete_and_stacked_adapters_are_refused(tmp_path):
    first = make_adapter(tmp_path / "first", make_base())
    with pytest.raises(CheckpointError, match="is itself an adapter"):
        resolve_model(str(make_adapter(tmp_path / "second", first)))
    (first / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        resolve_model(str(first))
    for config in ({}, *({"base_model_name_or_path": named} for named in (None, "", 7, ["a"]))):
        (first / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"names no base: write `--model BASE --adapter"):
            resolve_model(str(first))


def test_an_adapter_that_names_itself_as_base_is_refused(tmp_path, monkeypatch):
    adapter = make_adapter(tmp_path / "mine", tmp_path / "mine")
    words = r"mine names itself as its base, or one that rests on it: write .*--model BASE"
    for read in (resolve_model, model_under):
        with pytest.raises(CheckpointError, match=words):
            read(str(adapter))
    make_adapter(tmp_path / "here", ".")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"^\. names itself as its base"):
        resolve_model(".")


def test_adapters_and_runs_that_name_one_another_are_refused(tmp_path):
    first = make_adapter(tmp_path / "first", tmp_path / "second")
    make_adapter(tmp_path / "second", tmp_path / "third")
    make_adapter(tmp_path / "third", first)
    words = "first names itself as its base, or one that rests on it: write"
    for read in (resolve_model, model_under):
        with pytest.raises(CheckpointError, match=words):
            read(str(first))
    run = make_run(tmp_path, tmp_path / "runs" / "r1")
    with pytest.raises(CheckpointError, match="r1 names itself as its base"):
        resolve_model(str(run))


def test_an_adapter_of_the_hub_that_names_itself_is_refused(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = hub_snapshot(tmp_path / "cache", "some/adapter", lambda folder: make_adapter(folder, "some/adapter"))
    (snapshot / "config.json").write_text("{}")  # the file by which the cache finds it
    with pytest.raises(CheckpointError, match=r"is itself an adapter .some/adapter."):
        resolve_model("some/adapter")


def test_an_unreachable_hub_gives_one_clear_error(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(CheckpointError, match="some/model is no folder here, and the hub cannot be reached"):
        resolve_model("some/model")


def test_a_mistyped_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    """runs/dnoe looks like a hub id, but runs/ is a folder here."""
    monkeypatch.setattr(hub, "reachable", lambda: False)
    make_run(tmp_path, make_nvfp4(), name="done")
    with pytest.raises(CheckpointError, match=r"there is no folder runs/dnoe \(did you mean runs/done\?\), and the"):
        resolve_model("runs/dnoe")
    with pytest.raises(CheckpointError, match=r"no folder checkpoints/x \(beside it: checkpoints/Small-1B-NVFP4A16\)"):
        resolve_model("checkpoints/x")
    with pytest.raises(CheckpointError, match=r"no folder runs/dnoe"):
        resolve_model(str(make_base()), adapter="runs/dnoe")


def test_many_neighbours_are_counted_and_not_listed(tmp_path):
    for name in "abcdef":
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / ".hidden").mkdir()
    with pytest.raises(CheckpointError, match=r"\(beside it: runs/a, runs/b, runs/c and 3 others\)"):
        resolve_model("./runs/zzz")


@pytest.mark.parametrize("base", ["/gone/checkpoints/base", "my base", "base"])
def test_an_adapter_or_a_run_whose_base_has_moved_names_the_option(tmp_path, base):
    adapter, run = make_adapter(tmp_path / "adapter", base), make_run(tmp_path, base)
    for made, said in ((adapter, "an adapter of"), (run, "trained on")):
        with pytest.raises(CheckpointError, match=rf"{said} {base}, which is not here: .*--model BASE"):
            resolve_model(str(made))
