"""A damaged model folder gives one short error that names the file and the remedy."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.opening import Settings
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.roundings import ROUNDING


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


def test_a_config_with_other_shapes_is_refused_with_the_first_tensor_that_differs(damaged):
    with pytest.raises(CheckpointError, match=r"config\.json describes \(model\.embed_tokens\.weight is") as caught:
        load_model(damaged(vocab_size=8), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_an_architecture_that_transformers_does_not_know_is_refused(damaged):
    with pytest.raises(
        CheckpointError, match=r"cannot be loaded: .*`foo`.*take Qwen2, Qwen3, Llama or Mistral"
    ) as caught:
        load_model(damaged(model_type="foo"), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"rms_norm_eps": "a"}, "rms_norm_eps.* expected float"), ({"hidden_act": "nope"}, "KeyError 'nope'")],
)
def test_the_reason_of_transformers_is_kept(damaged, changes, reason):
    with pytest.raises(CheckpointError, match=rf"cannot be loaded: .*{reason}.*; take Qwen2") as caught:
        load_model(damaged(**changes), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)


MISFITS = {
    "a layer too many": ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing.* 9 in all"),
    "a layer too few": ({"num_hidden_layers": 1}, r"no place for model\.layers\.1\..* 9 in all"),
    "another architecture": ({"model_type": "qwen2"}, r"q_proj\.bias is missing"),
    "another vocabulary": ({"vocab_size": 400}, r"embed_tokens\.weight is \[320, 64\], not \[400, 64\]"),
}


def test_a_weight_of_whole_numbers_is_refused(tmp_path):
    folder = shutil.copytree(TINY_FOLDER, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].view(torch.int16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight as I16 without scales"):
        load_model(str(folder), "bf16", "float32", "cpu")


@pytest.mark.parametrize("name", MISFITS)
def test_weights_of_another_model_than_the_config_are_refused(tmp_path, name):
    """transformers would fill missing weights with random numbers, and drop those it has no place for."""
    changes, message = MISFITS[name]
    folder = make_checkpoint(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "bf16", "float32")
    with pytest.raises(CheckpointError, match=message if "layer" not in name else "lacks|model.layers.1"):
        quantize_checkpoint(str(folder), tmp_path / "out", ROUNDING)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "2"}', '{"eos_token_id": [2, null]}'])
def test_a_damaged_generation_config_is_named(damaged, text):
    folder = damaged()
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*copy"):
        open_engine(str(folder), "nvfp4", EngineOptions(engine="transformers"))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2, 7)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 2]}, (5, 2)), ({"top_k": 3}, (2, 7))],
    ids=["no generation config", "one", "two", "one that names none"],
)
def test_both_engines_stop_at_the_same_tokens(damaged, generation, expected):
    """At the tokenizer's token, and those of the generation config or else of the model config."""
    folder = damaged(eos_token_id=[2, 7])
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    own = load_tokenizer(folder).eos_token_id
    settings = Settings(str(folder), "nvfp4", EngineOptions())
    assert settings.stop_token_ids() == tuple(dict.fromkeys((own, *expected)))
    engine = open_engine(str(folder), "nvfp4", EngineOptions(engine="transformers"))
    assert engine.end_token_ids == settings.stop_token_ids()


def test_scales_of_an_8_bit_kv_cache_are_left_to_the_engine(nvfp4_base, tmp_path):
    folder = shutil.copytree(nvfp4_base, tmp_path / "calibrated")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert not any(name.endswith("k_scale") for name in load_model(folder, "nvfp4").state_dict())
