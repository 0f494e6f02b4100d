"""An adapter that qerl does not take is refused with the true reason, and a way out that works."""

import json
import shlex
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import read_fitting_adapter
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_factory import make_checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of PEFT, on embeddings
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Models of three layers, with tied embeddings or a head and biases of their own."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "tied": make_checkpoint(folder / "Tied-1B", "qwen3", layers=3),
        "untied": make_checkpoint(folder / "Untied-1B", "qwen2", layers=3),
    }


def adapter_on(base, folder, **config):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
    get_peft_model(model, LoraConfig(**config)).save_pretrained(folder)
    return folder


SOME = r"acts on {} in {} layers, and .* has it in 3 \(not in both: {}\): give"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layers_to_transform": [0]}, SOME.format("q_proj", 1, "1, 2")),
        ({"layers_to_transform": [0, 2]}, SOME.format("q_proj", 2, "1")),
        ({"target_modules": r".*layers\.1\.self_attn\.q_proj"}, SOME.format("q_proj", 1, "0, 2")),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, SOME.format("q_proj", 1, "1, 2")),
        ({"target_modules": r".*v_proj|.*0\.self_attn\.q_proj"}, SOME.format("q_proj", 1, "1, 2")),
        ({"modules_to_save": ["input_layernorm"]}, r"has input_layernorm trained and not post_attention_layernorm"),
        ({"modules_to_save": ["embed_tokens"]}, r"changes model.embed_tokens.weight"),
        ({"modules_to_save": ["lm_head"]}, r"changes lm_head.weight"),
        ({"bias": "lora_only"}, r"changes model.layers.0.self_attn.q_proj.base_layer.bias"),
    ],
)
def test_what_is_refused_for_a_run_can_be_merged(bases, tmp_path, config, said, here):
    base = bases["untied"]
    adapter = adapter_on(base, tmp_path / "my adapter", **config)
    with pytest.raises(CheckpointError, match=said) as refused:
        read_fitting_adapter(adapter, str(base))
    assert "another base" not in str(refused.value)
    line = str(refused.value).split("`")[1]
    assert shlex.split(line)[:2] == ["qerl", "merge"]
    code, _, error = here(*shlex.split(line)[1:], "--out", str(tmp_path / "merged"), "--prompt-count", "0")
    assert code == 0, error


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"modules_to_save": ["embed_tokens"]},
            "changes model.embed_tokens.weight .*no place for it: save the base.*as lm_head",
        ),
        ({"modules_to_save": ["lm_head"]}, "changes lm_head.weight .*no place for it: save the base"),
        ({"target_modules": ["lm_head", "q_proj"]}, "changes lm_head.weight .*no place for it: save the base"),
    ],
)
def test_what_a_tied_base_has_no_place_for_is_merged_once_it_is_untied(bases, tmp_path, config, said):
    from safetensors.torch import load_file, save_file

    base = bases["tied"]
    adapter = adapter_on(base, tmp_path / "adapter", **config)
    asked = ExportOptions(adapter=str(adapter), to="bf16", out=tmp_path / "merged", model=str(base), prompt_count=0)
    with pytest.raises(CheckpointError, match=said):
        export(asked)
    if "target_modules" in config:
        return
    untied = shutil.copytree(base, tmp_path / "untied")
    index = json.loads((untied / "model.safetensors.index.json").read_text())
    file = untied / index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    index["weight_map"]["lm_head.weight"] = file.name
    (untied / "model.safetensors.index.json").write_text(json.dumps(index))
    made = ExportOptions(adapter=str(adapter), to="bf16", out=tmp_path / "merged", model=str(untied), prompt_count=0)
    assert export(made).out.is_dir()


@pytest.mark.parametrize("config", [{"lora_bias": True}, {"use_dora": True}, {"trainable_token_indices": [1]}])
def test_other_kinds_name_what_makes_a_model_of_them(bases, tmp_path, config):
    adapter = adapter_on(bases["untied"], tmp_path / "adapter", **config)
    (kind,) = config
    with pytest.raises(CheckpointError, match=rf"LORA adapter with {kind}: only plain LoRA.*merge_and_unload"):
        read_fitting_adapter(adapter, str(bases["untied"]))
