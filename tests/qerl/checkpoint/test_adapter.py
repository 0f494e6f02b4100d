"""Adapters: names, the PEFT folder, and what a LoRA on packed weights must not do."""

import dataclasses
import json
import shlex
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter import (
    adapter_scaling,
    adapter_tensors,
    attach_lora,
    attach_saved_,
    load_tensors_,
    read_fitting_adapter,
    save_adapter,
)
from qerl.checkpoint.adapter_file import OTHER_ADAPTERS, PLAIN_STARTS, read_adapter
from qerl.checkpoint.load import load_model
from qerl.config.names import PROJECTIONS
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_factory import make_checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of PEFT, on embeddings
]
TOKENS = torch.arange(12)[None]


def randomize_(policy, std=0.05):
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.add_(std * torch.randn_like(tensor))


@pytest.fixture
def policy(nvfp4_base):
    torch.manual_seed(0)
    return attach_lora(load_model(nvfp4_base, "nvfp4"), rank=4, alpha=8, train_norms=True)


def test_tensors_have_the_names_of_the_base(policy):
    parts = [f"self_attn.{name}" for name in PROJECTIONS[:4]] + [f"mlp.{name}" for name in PROJECTIONS[4:]]
    expected = {f"{part}.lora_{side}.weight" for part in parts for side in "AB"}
    expected |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert set(adapter_tensors(policy)) == {f"model.layers.{layer}.{name}" for layer in range(2) for name in expected}
    assert adapter_scaling(policy) == 2.0
    assert {p for _, p in policy.named_parameters() if p.requires_grad} == set(adapter_tensors(policy).values())


def test_the_folder_is_a_standard_peft_folder(base, tmp_path):
    policy = attach_lora(load_model(base, "bf16", "float32"), rank=4, alpha=8)
    randomize_(policy)
    expected = policy(TOKENS).logits
    save_adapter(policy, tmp_path / "adapter", str(base))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert sorted(config["target_modules"]) == sorted(PROJECTIONS)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    torch.testing.assert_close(stock(TOKENS).logits, expected)


def test_a_fresh_adapter_changes_nothing_and_one_that_is_read_again_acts_as_before(nvfp4_base, policy, tmp_path):
    model = load_model(nvfp4_base, "nvfp4")
    clean = model(TOKENS).logits
    assert torch.equal(policy(TOKENS).logits, clean)
    randomize_(policy)
    expected = policy(TOKENS).logits
    assert (expected - clean).abs().max() > 0.01
    save_adapter(policy, tmp_path / "adapter", str(nvfp4_base))
    tensors, scaling = read_adapter(tmp_path / "adapter")
    assert scaling == 2.0
    assert set(tensors) == set(adapter_tensors(policy))
    attach_saved_(model, tensors, scaling)
    assert torch.equal(model(TOKENS).logits, expected)


def test_an_adapter_of_another_rank_or_base_is_refused(policy):
    tensors = {name: tensor.detach().clone() for name, tensor in adapter_tensors(policy).items()}
    name = next(name for name in tensors if "lora_A" in name)
    with pytest.raises(CheckpointError, match="another base or rank"):
        load_tensors_(policy, {**tensors, name: tensors[name][:2]})
    del tensors[name]
    with pytest.raises(CheckpointError, match="one side only"):
        load_tensors_(policy, tensors)


def test_an_unknown_target_is_refused_with_a_list_of_the_known_ones(base):
    with pytest.raises(ConfigError, match=r"query_proj match no linear .*q_proj"):
        attach_lora(load_model(base, "bf16"), rank=4, alpha=8, targets=("query_proj",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'.*path_initial_model_for_weight_conversion"),
        ({"lora_alpha": None}, "r 4 and lora_alpha None"),
        ({"lora_alpha": "8"}, "r 4 and lora_alpha '8'"),
        ({"r": 0}, "r 0 and lora_alpha 8"),
        ({"r": -4, "use_rslora": True}, "r -4 and"),
        ({"r": 8}, r"lora_A\.weight as float32 \(4, \d+\), and adapter_config\.json rank 8"),
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused(policy, tmp_path, change, message):
    save_adapter(policy, tmp_path, "base")
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("lora_A", lambda tensor: tensor[:2]),
        ("lora_B", lambda tensor: tensor[:, :2]),
        ("lora_A", lambda tensor: tensor[0]),
        ("lora_B", lambda tensor: tensor.to(torch.int8)),
    ],
    ids=["rank of A", "rank of B", "one axis", "integers"],
)
def test_factors_of_another_rank_than_the_config_has_are_refused(policy, tmp_path, part, change):
    """alpha / rank times B A would differ from what was trained."""
    save_adapter(policy, tmp_path, "base")
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(CheckpointError, match=f"{part}.weight as .* rank 4: only plain LoRA, of one rank"):
        read_adapter(tmp_path)


def adapter_on(base, folder, std=0.0, **config):
    """An adapter saved by PEFT, with random factors if `std` is not 0."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
    made = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, made.parameters()):
            parameter.add_(std * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{"use_rslora": True}, *({"init_lora_weights": way} for way in PLAIN_STARTS[2:])])
def test_a_plain_adapter_of_peft_computes_the_same_as_in_peft(base, tmp_path, options):
    if options == {"init_lora_weights": "eva"}:
        options = {"init_lora_weights": True}  # eva needs data, and saves the same as this
    adapter_on(base, tmp_path, 0.05, target_modules=["q_proj", "up_proj"], **options)
    own = attach_saved_(load_model(base, "bf16", "float32"), *read_fitting_adapter(tmp_path, str(base)))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, tmp_path).eval()(TOKENS).logits
    torch.testing.assert_close(own(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


def test_every_option_of_peft_is_known_to_be_harmless_or_refused():
    harmless = {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
        "use_rslora", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "velora_config", "megatron_core", "qalora_group_size", "runtime_config",
        "bias", "modules_to_save", "layers_to_transform", "layers_pattern", "ensure_weight_tying",  # seen by tensors
        "target_parameters", "rank_pattern", "alpha_pattern",  # of experts; others are refused in test_expert_adapter
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(LoraConfig)} == harmless | set(OTHER_ADAPTERS)


def test_missing_and_damaged_adapter_files_are_refused(policy, tmp_path):
    save_adapter(policy, tmp_path / "a", "base")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    assert load_file(weights)
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(tmp_path / "a")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        read_adapter(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not an adapter folder"):
        read_adapter(tmp_path / "a")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Models of three layers, with tied embeddings or a head and biases of their own."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "tied": make_checkpoint(folder / "Tied-1B", "qwen3", layers=3),
        "untied": make_checkpoint(folder / "Untied-1B", "qwen2", layers=3),
    }


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
        ({"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.weight .*place for it: save the base.*as lm_head"),
        ({"target_modules": ["lm_head", "q_proj"]}, "changes lm_head.weight .*no place for it: save the base"),
    ],
)
def test_what_a_tied_base_has_no_place_for_is_merged_once_it_is_untied(bases, tmp_path, config, said):
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


@pytest.mark.parametrize("kind", ["lora_bias", "use_dora", "trainable_token_indices", "alora_invocation_tokens"])
def test_other_kinds_name_what_makes_a_model_of_them(bases, tmp_path, kind):
    adapter = adapter_on(bases["untied"], tmp_path / "adapter", **{kind: [1] if "token" in kind else True})
    with pytest.raises(CheckpointError, match=rf"LORA adapter with {kind}: only plain LoRA.*merge_and_unload"):
        read_fitting_adapter(adapter, str(bases["untied"]))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_lora_on_the_head_or_the_embeddings_is_refused(bases, tmp_path, name):
    adapter = adapter_on(bases["untied"], tmp_path / "adapter", target_modules=["q_proj", name])
    with pytest.raises(CheckpointError, match=rf"changes (model\.)?{name}"):
        read_fitting_adapter(adapter, str(bases["untied"]))
