"""Each family of dense decoders with RMSNorm: quantize, one copy, adapter, noise and merge, on its own class."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import adapter_tensors, save_adapter
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.load import load_model
from qerl.checkpoint.peft_folder import loading, trained_on
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import TEXT_MODELS
from qerl.config.schema import AdapterConfig
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.opening import Settings
from qerl.formats.linear import PackedLinear
from qerl.model.norms import noise_norms, set_norm_noise_
from qerl.plan.micro_batch_plan import MicroBatchPlan
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_tokenizer
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.model_folders import edited, hub_snapshot
from tests.helpers.roundings import ROUNDING
from tests.helpers.row_files import write_sums
from training.policy.packed_policy import PackedPolicy
from training.policy.policy import build_policy

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GRANITE = {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2}
STATES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}
GEMMA4 = {
    **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "global_head_dim": 32},
    **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0},
}
FAMILIES = {
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "granite": GRANITE,
    "smollm3": {"no_rope_layer_interval": 2},
    "ministral3": {},
    "exaone4": {"sliding_window": 4},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {"attention_dropout": 0.0},
    "gemma3_text": {"sliding_window": 4},  # it has four norms per layer, whose gain is 1 + weight
    "gemma4_text": {**GEMMA4, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": GEMMA4,
    "qwen3_5_text": STATES,  # 1 + weight, as in Gemma 3
}
TEXT_PARTS = {  # whole model -> its class, and what its text part has besides
    "gemma3": ("Gemma3ForConditionalGeneration", {"sliding_window": 4}, {}),
    "mistral3": ("Mistral3ForConditionalGeneration", {}, {"head_dim": 16}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}},
        {"fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}},
        {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", STATES, {"num_position_embeddings": 16}),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {**GEMMA4, "hidden_size_per_layer_input": 0},
        {"head_dim": 16},
    ),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", GEMMA4, {}),
}
PICTURES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
}  # fmt: skip
IDS = torch.randint(8, 300, (2, 12), generator=torch.Generator().manual_seed(1))
WIDTH = 6  # tokens that are scored


def randomized_(model):
    """Norms that are not 1, and matrices large enough that the layers matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return model.eval()


def saved(model, folder):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def tokenizer():
    return make_tokenizer()


def text_model(family, **changes):
    config = AutoConfig.for_model(family, **SIZES, **changes)
    return randomized_(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def logprobs(model, ids=IDS):
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()[:, -WIDTH - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, -WIDTH:, None])[..., 0]


def test_a_layer_of_gemma_4_without_its_scale_is_refused(tmp_path):
    """It is a buffer, which has a value before it is read."""
    folder = Path(saved(text_model("gemma4_text", **FAMILIES["gemma4_text"]), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.layer_scalar"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.layer_scalar is missing"):
        quantize_checkpoint(str(folder), tmp_path / "packed", ROUNDING)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.layer_scalar is missing"):
        load_model(folder, "bf16", "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_quantized_trained_and_merged(family, tmp_path):
    twin = text_model(family, **FAMILIES[family])
    quantize_checkpoint(saved(twin, tmp_path / "model"), tmp_path / "packed", ROUNDING)
    base = resolve_model(str(tmp_path / "packed"))
    engine = open_engine(base.base, base.format, EngineOptions(engine="transformers"))
    policy = build_policy(engine, base, AdapterConfig(rank=4, alpha=8), seed=0)
    packed = {name: module for name, module in policy.base_model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == (
        13 if family.startswith(("qwen3_5", "gemma4")) else 14
    )  # of the engine's own model: there is no second copy
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in adapter_tensors(policy.model).values():
            tensor.add_(0.05 * torch.randn_like(tensor))
        tensors = adapter_tensors(policy.model)
        for name in [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")]:
            delta = 2.0 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            weight = policy.base_model.get_submodule(name).get_base_layer().dense(torch.float32)
            twin.get_submodule(name).weight.copy_(weight + delta)

    ones = torch.ones_like(IDS)
    policy_packed = PackedPolicy(policy.base_model, 1.0, MicroBatchPlan(10**6))
    found = policy_packed.score(IDS, ones, ones[:, -WIDTH:])
    with torch.no_grad():
        exact = logprobs(twin)
    torch.testing.assert_close(found, exact, rtol=2e-4, atol=2e-5)

    merged = AutoModelForCausalLM.from_pretrained(merged_folder(policy, base, tmp_path), dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(logprobs(merged), exact, rtol=2e-2, atol=2e-2)  # it is written in bfloat16
    check_noise(policy.base_model)


def merged_folder(policy, base, folder):
    save_adapter(policy.model, folder / "adapter", base.base)
    export(ExportOptions(adapter=str(folder / "adapter"), to="bf16", out=folder / "merged", prompt_count=0))
    return folder / "merged"


def check_noise(model):
    """Noise on the norms that linears read acts as a shift of their weights does, and leaves no trace."""
    norms = noise_norms(model)
    assert len(norms) == 4
    noise = {name: 0.1 * torch.randn_like(norm.weight.float()) for name, norm in norms.items()}
    with torch.no_grad():
        before = logprobs(model)
        set_norm_noise_(norms, noise)
        noisy = logprobs(model)
        assert not torch.allclose(noisy, before, atol=1e-3)
        set_norm_noise_(norms, None)
        assert torch.equal(logprobs(model), before)
        for name, norm in norms.items():
            norm.weight.add_(noise[name])
        torch.testing.assert_close(logprobs(model), noisy, rtol=1e-5, atol=1e-5)


def with_pictures(family):
    name, text, pictures = TEXT_PARTS[family]
    config = AutoConfig.for_model(family)
    text_config = type(config.text_config)(**SIZES, **text)
    config = type(config)(text_config=text_config.to_dict(), vision_config={**PICTURES, **pictures}, image_token_id=5)
    return randomized_(getattr(transformers, name)(config))


@pytest.mark.parametrize(
    "options",
    [QuantizeOptions("rtn"), QuantizeOptions("gptq"), QuantizeOptions("rtn", activations="static")],
    ids=["measured", "gptq", "static"],
)
def test_rows_go_through_a_text_part_as_through_the_text_model(options, tmp_path):
    whole = with_pictures("qwen3_vl")
    model = text_model("qwen3")
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.lm_head.load_state_dict(whole.lm_head.state_dict())
    options = replace(options, calibration=write_sums(tmp_path / "rows.jsonl"), calibration_size=2, sequence_length=32)
    found = {}
    for kind, each in (("part", whole), ("text", model)):
        out = tmp_path / kind / "packed"
        report = quantize_checkpoint(saved(each, tmp_path / f"{kind}-16"), out, options)
        found[kind] = load_all(out), report.outputs
        assert report.source == str(tmp_path / f"{kind}-16")
        assert [path.name for path in out.parent.iterdir()] == ["packed"]
    assert found["part"][1] == found["text"][1]
    assert set(found["part"][0]) == set(found["text"][0])
    assert all(torch.equal(value, found["text"][0][name]) for name, value in found["part"][0].items())


@pytest.mark.parametrize("family", TEXT_PARTS)
def test_the_text_part_of_a_model_for_pictures_and_text_computes_what_it_does_there(family, tmp_path):
    whole = with_pictures(family)
    quantize_checkpoint(saved(whole, tmp_path / "model"), tmp_path / "packed", ROUNDING)
    settings = Settings(str(tmp_path / "model"), "bf16", EngineOptions())
    assert settings.config.model_type == TEXT_MODELS[whole.config.text_config.model_type][0]
    base = resolve_model(str(tmp_path / "packed"))
    engine = open_engine(base.base, base.format, EngineOptions(engine="transformers"))
    model = engine.policy_model()
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                inner = whole.model.language_model.get_submodule(module_name.removeprefix("model."))
                inner.weight.copy_(module.dense(torch.float32))
        torch.testing.assert_close(logprobs(model), logprobs(whole), rtol=1e-4, atol=1e-5)
        if (
            family == "qwen3_5" or "gemma4" in family
        ):  # whose norms and attention are transformers' own: without our other modules, all is
            for module in model.modules():
                module.__dict__.pop("forward", None)
            assert torch.equal(logprobs(model), logprobs(whole))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4"])
def test_an_adapter_on_a_text_part_acts_on_the_whole_model(family, tmp_path, monkeypatch):
    """PEFT on the whole model computes what our text model does, and wraps nothing of what sees pictures.

    Of Qwen3-VL stock vLLM serves the text part as Qwen3, so that its adapter stays one of the text model.
    """
    whole = with_pictures(family)
    quantize_checkpoint(saved(whole, tmp_path / "model"), tmp_path / "packed", ROUNDING)
    base = resolve_model(str(tmp_path / "packed"))
    engine = open_engine(base.base, base.format, EngineOptions(engine="transformers"))
    policy = build_policy(engine, base, AdapterConfig(rank=4, alpha=8), seed=0)
    text = text_model(whole.config.text_config.model_type.replace("qwen3_vl_text", "qwen3"), **TEXT_PARTS[family][1])
    with torch.no_grad():
        for name, tensor in adapter_tensors(policy.model).items():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
        for name, module in policy.base_model.named_modules():
            if isinstance(module, PackedLinear):
                inner = name.removeprefix("model.").removesuffix(".base_layer")
                whole.model.language_model.get_submodule(inner).weight.copy_(module.dense(torch.float32))
        expected = logprobs(policy.base_model)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    save_adapter(policy.model, tmp_path / "adapter", base.base)
    export(ExportOptions(adapter=str(tmp_path / "adapter"), to="adapter", out=tmp_path / "out"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub_snapshot(tmp_path / "cache", "some/Whole", lambda folder: shutil.copytree(tmp_path / "model", folder))
    save_adapter(policy.model, tmp_path / "by-id", "some/Whole")
    doors = [(text, None)] if family == "qwen3_vl" else [(whole, None), (text, {"model.language_model.": "model."})]
    own = {name: tensor.detach() for name, tensor in adapter_tensors(policy.model).items()}
    for folder in (tmp_path / "adapter", tmp_path / "out", tmp_path / "by-id"):
        read, _ = read_adapter(folder)
        assert read.keys() == own.keys()
        assert all(torch.equal(read[name], own[name]) for name in own)
        for model, mapping in doors:
            peft = PeftModel.from_pretrained(model, str(folder), key_mapping=mapping)
            wrapped = {name.partition(".lora_A.")[0] for name, _ in peft.named_parameters() if ".lora_A." in name}
            assert len(wrapped) == len(own) // 2
            with torch.no_grad():
                torch.testing.assert_close(logprobs(peft), expected, rtol=1e-4, atol=1e-5)
            peft.unload()
    said = loading("adapter", trained_on(base.base), "start")
    assert ("AutoModelForImageTextToText" in said, "key_mapping" in said) == (len(doors) == 2,) * 2


def test_vllm_is_not_told_how_positions_of_pictures_are_rotated(tmp_path):
    folder = Path(saved(text_model("qwen3_5_text"), tmp_path / "model"))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    edited(folder, rope_parameters=rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True})
    assert Settings(str(folder), "bf16", EngineOptions()).overrides()["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("olmo_hybrid", "linear_"),
        ("phi3", "gate_up_proj|qkv_proj"),
        ("glm4", "gate_up_proj"),
        ("nemotron", "lacks .*gate_proj"),
    ],
)
def test_a_family_that_is_refused_hears_which_part_is_missing(family, part, tmp_path):
    folder = saved(text_model(family), tmp_path / "model")
    with pytest.raises(CheckpointError, match=part):
        quantize_checkpoint(folder, tmp_path / "out", ROUNDING)
    assert not (tmp_path / "out").exists()


def test_the_text_part_of_another_family_is_refused_by_what_it_has(tmp_path):
    config = AutoConfig.for_model("qwen3_5_moe")
    text_config = type(config.text_config)(**SIZES, num_experts=4, num_experts_per_tok=2)
    config = type(config)(text_config=text_config.to_dict(), vision_config=PICTURES, image_token_id=5)
    folder = saved(transformers.Qwen3_5MoeForConditionalGeneration(config), tmp_path / "model")
    said = r"pictures and text \(qwen3_5_moe\).*does not support a text part of the type qwen3_5_moe_text"
    with pytest.raises(CheckpointError, match=said):
        quantize_checkpoint(folder, tmp_path / "out", ROUNDING)


@pytest.mark.parametrize("rows", [False, True])
def test_the_folder_that_was_given_is_named_where_its_text_part_cannot_be_opened(rows, tmp_path):
    folder = Path(saved(with_pictures("qwen3_vl"), tmp_path / "model"))
    options = replace(ROUNDING, calibration=write_sums(tmp_path / "rows.jsonl")) if rows else ROUNDING
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edited(folder, text_config={key: value for key, value in text.items() if key != "intermediate_size"})
    with pytest.raises(CheckpointError, match=rf"^{folder} does not hold the model that its config.json describes"):
        quantize_checkpoint(str(folder), tmp_path / "out" / "packed", options)
    edited(folder, text_config=text)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": 3}')
    if rows:
        with pytest.raises(CheckpointError, match=rf"^{folder} has no tokenizer that can be read"):
            quantize_checkpoint(str(folder), tmp_path / "out" / "packed", options)
    assert not any(tmp_path.glob("out/*"))
