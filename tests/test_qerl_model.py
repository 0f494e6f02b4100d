"""Damaged model folders: one short error that names the file and the remedy."""

import json
import shutil

import pytest

from qerl.errors import CheckpointError
from qerl.model import load_model


@pytest.fixture
def damaged(nvfp4_base, tmp_path):
    """A copy of the NVFP4 base whose config.json can be edited: damaged(key=value)."""

    def edit(**changes):
        folder = tmp_path / "model"
        shutil.copytree(nvfp4_base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return edit


def test_a_config_of_other_shapes_is_named_by_its_first_tensor(damaged):
    with pytest.raises(CheckpointError, match=r"does not fit its config\.json \(size mismatch for") as caught:
        load_model(damaged(vocab_size=8), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_an_architecture_that_transformers_does_not_know(damaged):
    with pytest.raises(
        CheckpointError, match=r"cannot be loaded: .*`foo`.*take Qwen2, Qwen3, Llama or Mistral"
    ) as caught:
        load_model(damaged(model_type="foo"), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)
