"""A config.json with values that cannot be is refused in one line and at once, by everything that reads it."""

import json
import math
import os
import shutil
from contextlib import suppress

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import check_numbers
from qerl.checkpoint.load import check_config_fits, end_token_ids, load_model, load_tokenizer
from qerl.checkpoint.shards import read_tensors
from qerl.checkpoint.source import read_source
from qerl.plan.sizes import read_sizes
from tests.helpers.bases import write_base

COUNTS = (10**9, 10**30, -1, 0, "2", "x" * 1000, 2.5, math.nan, math.inf, True, None, [2], {"a": 1})
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
OTHERS = [
    ("num_key_value_heads", 3), ("num_key_value_heads", "2"), ("head_dim", -16), ("head_dim", 10**12),
    ("num_attention_heads", 3), ("max_position_embeddings", "many"), ("max_position_embeddings", -5),
    ("max_position_embeddings", math.nan), ("hidden_act", "nothing"), ("hidden_act", ["silu"]),
    ("rms_norm_eps", "small"), ("model_type", ["qwen3"]), ("model_type", "nothing"), ("model_type", None),
    ("dtype", "nothing"), ("dtype", 16), ("architectures", "Qwen3"), ("architectures", [1]),
    ("rope_parameters", {"rope_type": "nothing"}), ("rope_parameters", 7), ("rope_theta", "x"), ("layer_types", [1, 2]),
    ("layer_types", "x"), ("quantization_config", []), ("quantization_config", {"quant_method": ["x"]}),
    ("quantization_config", {"config_groups": {"group_0": 3}, "quant_method": "compressed-tensors"}),
    ("sliding_window", -3), ("use_sliding_window", "yes"), ("attention_dropout", "x"), ("pad_token_id", 10**9),
    ("auto_map", {"AutoConfig": "code.Config"}), ("tie_word_embeddings", "no"), ("attention_bias", [1]),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("odd") / "model", hidden=64)


@pytest.fixture
def changed(model, tmp_path):
    """Copies of the model with one value of its config.json changed."""
    original = json.loads((model / "config.json").read_text())
    folder = tmp_path / "model"
    shutil.copytree(model, folder, copy_function=os.link)

    def change(key, value):
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**original, key: value}))
        return folder

    return change


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_cannot_be_is_refused(changed, key):
    for value in COUNTS:
        folder = changed(key, value)
        for read in (read_sizes, read_source):
            with pytest.raises(CheckpointError, match=rf"config.json.*{key}"):
                read(str(folder))
        for read in (lambda path: load_model(path, "bf16"), lambda path: check_config_fits(path, read_tensors(path))):
            with pytest.raises(CheckpointError):
                read(folder)


@pytest.mark.parametrize(("key", "value"), OTHERS)
def test_an_odd_value_is_refused_or_of_no_consequence(changed, key, value):
    folder = changed(key, value)
    for read in (read_source, read_sizes, lambda path: load_model(path, "bf16"), load_tokenizer):
        with suppress(CheckpointError):
            read(str(folder))


@pytest.mark.parametrize("value", ["x", [[1]], -1, 10**12, {"a": 1}, [True], math.nan])
def test_tokens_that_end_a_completion_are_numbers_of_tokens(model, changed, value):
    folder, tokenizer = changed("eos_token_id", value), load_tokenizer(model)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        end_token_ids(folder, None, tokenizer)


@pytest.mark.parametrize("window", [0, -1, 0.5])
def test_a_window_of_no_token_is_refused(window):
    with pytest.raises(CheckpointError, match=f"sliding_window {window}, which is no whole number above 0"):
        check_numbers({"sliding_window": window}, "model")
    check_numbers({"sliding_window": None}, "model")
