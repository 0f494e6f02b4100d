"""Adapters: names, the PEFT folder, and what a LoRA on packed weights must not do."""

import dataclasses
import json
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
from qerl.formats.nvfp4.linear import NVFP4Linear

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
    names = set(adapter_tensors(policy))
    expected = {
        f"model.layers.{layer}.{block}.{projection}.lora_{side}.weight"
        for layer in range(2)
        for projection in PROJECTIONS
        for block in ["self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"]
        for side in "AB"
    }
    norms = {f"model.layers.{i}.{n}.weight" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")}
    assert names == expected | norms
    assert adapter_scaling(policy) == 2.0
    assert {p for _, p in policy.named_parameters() if p.requires_grad} == set(adapter_tensors(policy).values())


def test_a_fresh_adapter_changes_nothing_and_a_random_one_does(nvfp4_base, policy):
    clean = load_model(nvfp4_base, "nvfp4")(TOKENS).logits
    assert torch.equal(policy(TOKENS).logits, clean)
    randomize_(policy)
    assert (policy(TOKENS).logits - clean).abs().max() > 0.01


def unpack_(model):
    """Make the dense twin: replace each packed linear by an ordinary one with its float32 weights."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NVFP4Linear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.dense(torch.float32)
            model.set_submodule(name, linear.requires_grad_(False))
    return model


def test_gradients_equal_those_on_the_dense_twin(nvfp4_base):
    gradients = []
    for model in (load_model(nvfp4_base, "nvfp4"), unpack_(load_model(nvfp4_base, "nvfp4"))):
        torch.manual_seed(0)
        policy = attach_lora(model, rank=4, alpha=8)
        randomize_(policy)
        torch.log_softmax(policy(TOKENS).logits, -1)[..., 0].sum().backward()
        gradients.append({name: tensor.grad for name, tensor in adapter_tensors(policy).items()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, gradients[1][name])


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


def test_read_and_attach_again_gives_the_same_model(nvfp4_base, policy, tmp_path):
    randomize_(policy)
    expected = policy(TOKENS).logits
    save_adapter(policy, tmp_path / "adapter", str(nvfp4_base))
    tensors, scaling = read_adapter(tmp_path / "adapter")
    assert scaling == 2.0
    assert set(tensors) == set(adapter_tensors(policy))
    model = load_model(nvfp4_base, "nvfp4")
    attach_saved_(model, tensors, scaling)
    assert torch.equal(model(TOKENS).logits, expected)


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_into_packed_weights_raises(policy, call):
    with pytest.raises(CheckpointError, match="merge"):
        getattr(policy, call)()


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
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "'olora'"),
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
        ("lora_A", lambda tensor: tensor[:2].contiguous()),
        ("lora_B", lambda tensor: tensor[:, :2].contiguous()),
        ("lora_A", lambda tensor: tensor[0].contiguous()),
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
    save_file({**tensors, name: change(tensors[name])}, path)
    with pytest.raises(CheckpointError, match=f"{part}.weight as .* rank 4: only plain LoRA, of one rank"):
        read_adapter(tmp_path)


def made_by_peft(base, folder, options):
    """A random adapter saved by PEFT, and its 16-bit base."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **options})
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, made.parameters()):
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return plain


@pytest.mark.parametrize("options", [{"use_rslora": True}, *({"init_lora_weights": way} for way in PLAIN_STARTS[2:])])
def test_a_plain_adapter_of_peft_computes_the_same_as_in_peft(base, tmp_path, options):
    if options == {"init_lora_weights": "eva"}:
        options = {"init_lora_weights": True}  # eva needs data, and saves the same as this
    plain = made_by_peft(base, tmp_path, options)
    own = attach_saved_(load_model(base, "bf16", "float32"), *read_fitting_adapter(tmp_path, str(base)))
    expected = PeftModel.from_pretrained(plain, tmp_path).eval()(TOKENS).logits
    torch.testing.assert_close(own(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"modules_to_save": ["lm_head"]}, r"changes lm_head\.weight"),
        ({"modules_to_save": ["norm"]}, r"changes model\..*norm\.weight"),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"changes model\.embed_tokens"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_peft_that_changes_more_is_refused(base, tmp_path, options, message):
    made_by_peft(base, tmp_path, options)
    with pytest.raises(CheckpointError, match=message):
        read_fitting_adapter(tmp_path, str(base))


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
