"""Starting from a saved adapter: a misfit is refused before an engine is opened, and nothing is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import TRAINED_ON
from tests.helpers.small_run import small_config
from training import run as training_run
from training.run import start


@pytest.fixture(scope="module")
def adapter(nvfp4_base, tmp_path_factory):
    """The adapter of a run of three steps."""
    folder = tmp_path_factory.mktemp("first")
    return start(small_config(nvfp4_base, folder, steps=3), "first").adapter


@pytest.fixture
def no_engine(monkeypatch):
    monkeypatch.setattr(training_run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))


def copy_of(adapter, folder, change=None, **settings):
    """A copy of the adapter with other settings or tensors."""
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    shutil.copy(adapter / TRAINED_ON, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(change(tensors) if change else tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_that_fits_is_accepted(adapter, tmp_path):
    result = start(small_config(adapter, tmp_path, steps=3), "second")
    assert result.steps == 3


def test_another_rank_is_named_with_what_to_write(adapter, tmp_path, no_engine):
    rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    with pytest.raises(ConfigError, match=rf"write adapter\.rank: {rank}"):
        start(small_config(adapter, tmp_path, f"adapter.rank={2 * rank}"), "x")
    assert not (tmp_path / "run").exists()


def test_another_alpha_is_named_with_what_to_write(adapter, tmp_path, no_engine):
    with pytest.raises(ConfigError, match=r"write adapter\.alpha"):
        start(small_config(adapter, tmp_path, "adapter.alpha=1"), "x")


def query_and_value(tensors):
    return {name: tensor for name, tensor in tensors.items() if "q_proj" in name or "v_proj" in name}


def with_norms(tensors):
    layers = {name.partition(".self_attn")[0] for name in tensors if ".self_attn." in name}
    leaves = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{layer}.{leaf}.weight": torch.ones(64) for layer in layers for leaf in leaves}


def norms(tensors):
    return {name: tensor for name, tensor in with_norms(tensors).items() if "layernorm" in name}


@pytest.mark.parametrize(
    ("change", "override", "words"),
    [
        (query_and_value, "run.seed=0", r"write adapter\.targets: \[q_proj, v_proj\]"),
        (None, "adapter.targets=[q_proj, v_proj]", r"write adapter\.targets: \[q_proj, k_proj, .*down_proj\]"),
        (with_norms, "run.seed=0", r"write adapter\.train_norms: true"),
        (None, "adapter.train_norms=true", r"write adapter\.train_norms: false"),
    ],
    ids=["fewer linears", "more linears", "norms", "no norms"],
)
def test_other_targets_and_norms_are_named_with_what_to_write(adapter, tmp_path, no_engine, change, override, words):
    other = copy_of(adapter, tmp_path / "other", change)
    with pytest.raises(ConfigError, match=words):
        start(small_config(other, tmp_path, override), "x")
    assert not (tmp_path / "run").exists()


def test_the_remedy_of_the_message_works(adapter, tmp_path):
    other = copy_of(adapter, tmp_path / "other", lambda tensors: query_and_value(tensors) | norms(tensors))
    config = small_config(other, tmp_path, "adapter.targets=[q_proj, v_proj]", "adapter.train_norms=true", steps=3)
    assert start(config, "second").steps == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: {k: v[:, :-16].contiguous() if "q_proj.lora_A" in k else v for k, v in t.items()},
            "is of another base",
        ),
        (
            lambda t: {k: v for k, v in t.items() if ".layers.0." not in k},
            r"acts on .* in 1 layers, .*\(not in both: 0\)",
        ),
        (lambda t: {k.replace("q_proj", "w_proj"): v for k, v in t.items()}, "missing"),
        (
            lambda t: {k: v for k, v in t.items() if ".1.self_attn.q_proj." not in k},
            r"acts on q_proj in 1 layers, .*\(not in both: 1\)",
        ),
        (lambda t: {k: v[:32] if "layernorm" in k else v for k, v in with_norms(t).items()}, "layernorm 64"),
        (
            lambda t: {k: v for k, v in with_norms(t).items() if ".1.input" not in k},
            r"acts on input_layernorm in 1 layers",
        ),
    ],
    ids=["width", "layers", "name", "a layer's linear", "norm's size", "a layer's norm"],
)
def test_an_adapter_of_another_base_is_refused(adapter, tmp_path, no_engine, change, words):
    other = copy_of(adapter, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=words):
        start(small_config(other, tmp_path), "x")
    assert not (tmp_path / "run").exists()
