"""Starting from a saved adapter: what does not fit is refused before an engine is opened, and nothing is written."""

import json

import pytest
from safetensors.torch import load_file, save_file
from small_run import small_config

from qerl.errors import CheckpointError, ConfigError
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
    """The adapter with other settings or tensors."""
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(change(tensors) if change else tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_fitting_adapter_is_taken(adapter, tmp_path):
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: {k: v[:, :-16].contiguous() if "q_proj.lora_A" in k else v for k, v in t.items()},
            "is of another base",
        ),
        (lambda t: {k: v for k, v in t.items() if ".layers.0." not in k}, "layers and the base"),
        (lambda t: {k.replace("q_proj", "w_proj"): v for k, v in t.items()}, "missing"),
    ],
    ids=["width", "layers", "name"],
)
def test_an_adapter_of_another_base_is_refused(adapter, tmp_path, no_engine, change, words):
    other = copy_of(adapter, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=words):
        start(small_config(other, tmp_path), "x")
    assert not (tmp_path / "run").exists()
