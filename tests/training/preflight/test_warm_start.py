"""Starting from a saved adapter: a misfit is refused before an engine is opened, and nothing is written."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import TRAINED_ON
from tests.helpers.small_run import small_config
from training import run as training_run
from training.run import start


@pytest.fixture
def copy_of(whole_run, tmp_path):
    """A copy of an adapter of rank 16 with other tensors."""

    def made(change):
        folder = tmp_path / "other"
        folder.mkdir()
        for name in ("adapter_config.json", TRAINED_ON):
            shutil.copy(whole_run / "adapter" / name, folder)
        save_file(
            change(load_file(whole_run / "adapter/adapter_model.safetensors")), folder / "adapter_model.safetensors"
        )
        return folder

    return made


def query_and_value(tensors):
    return {name: tensor for name, tensor in tensors.items() if "q_proj" in name or "v_proj" in name}


def with_norms(tensors):
    layers = {name.partition(".self_attn")[0] for name in tensors if ".self_attn." in name}
    leaves = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{layer}.{leaf}.weight": torch.ones(64) for layer in layers for leaf in leaves}


def norms(tensors):
    return {name: tensor for name, tensor in with_norms(tensors).items() if "layernorm" in name}


def test_the_remedy_of_the_message_works(copy_of, tmp_path):
    other = copy_of(lambda tensors: query_and_value(tensors) | norms(tensors))
    settings = ("adapter.targets=[q_proj, v_proj]", "adapter.train_norms=true", "noise.enabled=false")
    assert start(small_config(other, tmp_path, *settings, steps=1), "second").steps == 1


def same(tensors):
    return tensors


REFUSED = {
    "rank": (same, "adapter.rank=32", r"write adapter\.rank: 16"),
    "alpha": (same, "adapter.alpha=1", r"write adapter\.alpha"),
    "fewer linears": (query_and_value, "run.seed=0", r"write adapter\.targets: \[q_proj, v_proj\]"),
    "more linears": (same, "adapter.targets=[q_proj]", r"write adapter\.targets: \[q_proj, k_proj, .*down_proj\]"),
    "norms": (with_norms, "run.seed=0", r"write adapter\.train_norms: true"),
    "no norms": (same, "adapter.train_norms=true", r"write adapter\.train_norms: false"),
    "width": (
        lambda t: {k: v[:, :-16].contiguous() if "q_proj.lora_A" in k else v for k, v in t.items()},
        *("run.seed=0", "is of another base"),
    ),
    "layers": (
        lambda t: {k: v for k, v in t.items() if ".layers.0." not in k},
        *("run.seed=0", r"acts on .* in 1 layers, .*\(not in both: 0\)"),
    ),
    "name": (lambda t: {k.replace("q_proj", "w_proj"): v for k, v in t.items()}, "run.seed=0", "missing"),
    "a layer's linear": (
        lambda t: {k: v for k, v in t.items() if ".1.self_attn.q_proj." not in k},
        *("run.seed=0", r"acts on q_proj in 1 layers, .*\(not in both: 1\)"),
    ),
    "norm's size": (
        lambda t: {k: v[:32] if "layernorm" in k else v for k, v in with_norms(t).items()},
        *("run.seed=0", "layernorm 64"),
    ),
}


@pytest.mark.parametrize(("change", "override", "words"), REFUSED.values(), ids=REFUSED)
def test_a_misfit_is_refused_before_an_engine_is_opened(copy_of, tmp_path, monkeypatch, change, override, words):
    monkeypatch.setattr(training_run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))
    other = copy_of(change)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        start(small_config(other, tmp_path, override), "x")
    assert not (tmp_path / "run").exists()
