"""Runs on small models whose layers differ: trained, resumed, merged, opened.

Of Qwen3.5 all layers but every fourth have linear attention. Of Gemma 4 those with full attention have other head
sizes than those with a window, and no `v_proj`; each has four norms and a scale, and logits are capped.
"""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import training.trainer
from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter import attach_lora, save_adapter
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import TensorReader, read_json, read_tensors
from qerl.config.recipe import load_recipe
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import read_sizes
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.bases import write_base
from tests.helpers.killed import killed_in
from tests.helpers.roundings import ROUNDING
from tests.helpers.row_files import write_sums
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.small_sft import small_sft
from training.preflight.plan import plan
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")
STATES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "num_hidden_layers": 4,
}
GEMMA = {
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    **{"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"final_logit_softcapping": 6.0, "hidden_size_per_layer_input": 0},
}
EVERY = {"qwen3_5_text": 3 * 3 + 4 + 4 * 3, "gemma4_text": 4 + 3 + 2 * 3}  # linears that are packed
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("hybrid") / "base", "qwen3_5_text", **STATES)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("gemma") / "base", "gemma4_text", **GEMMA)


@pytest.fixture(scope="module", params=EVERY)
def small(request):
    return request.getfixturevalue({"qwen3_5_text": "hybrid", "gemma4_text": "gemma"}[request.param])


@pytest.fixture
def every(small):
    return EVERY[read_json(small / "config.json")["model_type"]]


def packed_beside(folder):
    out = folder.parent / "packed"
    if not out.is_dir():
        quantize_checkpoint(str(folder), out, ROUNDING)
    return out


@pytest.fixture(scope="module")
def packed(small):
    return packed_beside(small)


@pytest.fixture(scope="module")
def finished(packed, tmp_path_factory):
    """A run of 4 steps with an adapter, noise and a KL term."""
    return start(small_config(packed, tmp_path_factory.mktemp("run"), "loss.kl_coef=0.1", steps=4), "tiny").run_dir


def stored(folder):
    infos = read_tensors(folder)
    with TensorReader(infos) as read:
        return {name: read(name) for name in infos}


def test_small_parts_stay_in_16_bits_and_what_is_fused_shares_a_scale(hybrid):
    packed = packed_beside(hybrid)
    before, after = stored(hybrid), stored(packed)
    inside = "model.layers.0.linear_attn"
    for name in ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias", "norm.weight"):
        assert torch.equal(before[f"{inside}.{name}"], after[f"{inside}.{name}"])
    one, other = (after[f"{inside}.in_proj_{part}.weight_global_scale"] for part in ("qkv", "z"))
    assert torch.equal(one, other)
    assert {f"{inside}.in_proj_a", f"{inside}.conv1d"} <= set(
        read_json(packed / "config.json")["quantization_config"]["ignore"]
    )


@pytest.mark.parametrize("method", ["search_gptq", "gptq"])
def test_rows_go_through_the_layers_and_both_methods_share_the_scale(small, every, tmp_path, method):
    options = QuantizeOptions(
        method, calibration=write_sums(tmp_path / "rows.jsonl"), calibration_size=2, sequence_length=32
    )
    report = quantize_checkpoint(str(small), tmp_path / "packed", options)
    assert len(report.layers) == every
    scales = {name: t for name, t in stored(tmp_path / "packed").items() if name.endswith("global_scale")}
    for name, scale in scales.items():
        if ".q_proj." in name:
            assert torch.equal(scale, scales[name.replace("q_proj", "k_proj")])


def test_a_rescaling_of_norms_is_refused(small, tmp_path):
    with pytest.raises(ConfigError, match=r"1 \+ weight|values are normed"):
        quantize_checkpoint(str(small), tmp_path / "packed", QuantizeOptions("awq"))


def test_patterns_that_split_what_is_fused_are_refused(hybrid, tmp_path):
    with pytest.raises(ConfigError, match=r"in_proj_z in 16 bits but not .*in_proj_qkv"):
        quantize_checkpoint(str(hybrid), tmp_path / "packed", QuantizeOptions("rtn", ignore=("re:.*in_proj_z",)))


def test_sampler_and_trainer_agree_and_noise_reaches_both_norms_of_each_layer(finished, packed, every):
    rows = numbers(finished)
    assert rows[0]["mismatch_kl"] < 1e-8
    noisy = [row for row in rows if row["noise/sigma"] == 0.05]
    assert noisy
    layers = read_json(packed / "config.json")["num_hidden_layers"]
    assert all(row["noise/norms"] == 2 * layers and row["mismatch_kl"] > 1e-6 for row in noisy)
    tensors, _ = read_adapter(finished / "adapter")
    assert len(tensors) == 2 * every
    assert all(tensor.any() for name, tensor in tensors.items() if name.endswith(".lora_B.weight"))


def test_a_run_that_died_resumes_to_the_same_numbers(finished, packed, tmp_path):
    config = small_config(packed, tmp_path, "loss.kl_coef=0.1", steps=4)
    with killed_in(training.trainer.QerlTrainer, "loss_of", 7):
        start(config, "tiny")
    result = resume(tmp_path / "run")
    assert numbers(result.run_dir) == numbers(finished)
    assert same_adapters(result.adapter, finished / "adapter")


def test_layers_that_recompute_learn_the_same_to_the_bit(finished, packed, tmp_path):
    recomputes = small_config(packed, tmp_path, "loss.kl_coef=0.1", "run.gradient_checkpointing=true", steps=4)
    result = start(recomputes, "tiny")
    assert numbers(result.run_dir) == numbers(finished)
    assert same_adapters(result.adapter, finished / "adapter")


def test_the_merged_model_is_what_transformers_opens(finished, packed, tmp_path):
    options = ExportOptions(adapter=str(finished), to="bf16", out=tmp_path / "out", prompt_count=2, max_new_tokens=4)
    report = export(options)
    assert report.effect.kl_merged < report.effect.kl_base / 5
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert [type(merged).__name__] == read_json(packed / "config.json")["architectures"]
    engine = open_model(resolve_model(str(tmp_path / "out")), EngineOptions(engine="transformers"))
    completions = [done.token_ids for done in engine.generate(PROMPTS, SamplingParams(8), seed=0)]
    for prompt, completion, expected in zip(PROMPTS, completions, engine.score(PROMPTS, completions), strict=True):
        with torch.no_grad():
            logits = merged(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_decays_stay_as_wide_as_the_file_has_them(hybrid, tmp_path):
    """Rounded to 16 bits they would be off by up to 0.4% in every token."""
    wide = shutil.copytree(packed_beside(hybrid), tmp_path / "wide")
    name = "model.layers.0.linear_attn.A_log"
    file = read_tensors(wide)[name].file
    tensors = load_file(file)
    tensors[name] = tensors[name].float() + 1e-4
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_model(wide, "nvfp4", "bfloat16")
    assert torch.equal(model.get_parameter(name), tensors[name])
    assert model.get_parameter(name.replace("A_log", "norm.weight")).dtype == torch.bfloat16
    policy = attach_lora(model, 2, 4.0)
    save_adapter(policy, tmp_path / "adapter", str(wide))
    export(ExportOptions(adapter=str(tmp_path / "adapter"), to="bf16", out=tmp_path / "out", prompt_count=0))
    assert torch.equal(stored(tmp_path / "out")[name], tensors[name])


def test_a_merge_is_packed_again(finished, every, tmp_path):
    export(ExportOptions(adapter=str(finished), to="nvfp4", out=tmp_path / "out", prompt_count=0))
    assert sum(name.endswith("weight_packed") for name in stored(tmp_path / "out")) == every


@pytest.mark.parametrize("mode", ["weights", "adapter"])
def test_whole_weights_or_an_adapter_are_trained_through_the_quantizer(small, every, tmp_path, mode):
    settings = (f"qat.mode={mode}", "noise.enabled=false", "optim.learning_rate=1e-3", "run.save_every=1")
    config = small_config(small, tmp_path, *settings, steps=2)
    run = start(config, "qat").run_dir
    assert all(row["mismatch_kl"] < 1e-8 for row in numbers(run))
    begun, model = stored(run / "base") if mode == "weights" else None, stored(run / "model")
    if begun is not None:
        changed = {name.rpartition(".")[0] for name, tensor in model.items() if not torch.equal(tensor, begun[name])}
        linears = decoder_of(read_json(small / "config.json"), "m").linears()
        assert {linears[0], linears[-7]} <= changed
    assert sum(name.endswith("weight_packed") for name in model) == every


def test_only_the_feed_forward_layers_leaves_attention_of_both_kinds_in_16_bits(hybrid):
    from qerl.plan.trained import quantized_linears

    quant = load_recipe("tiny", ["qat.quant_cfg=nvfp4_w4a16_ffn"]).qat
    linears = quantized_linears(quant, decoder_of(read_json(hybrid / "config.json"), "m"))
    assert len(linears) == 4 * 3
    assert all(".mlp." in name for name in linears)


def test_given_rows_are_learned(packed, tmp_path):
    run = start(small_sft(packed, tmp_path, steps=6), "sft").run_dir
    losses = [row["loss"] for row in numbers(run)]
    assert losses[-1] < losses[0]


def test_norms_can_be_trained(packed, tmp_path):
    config = small_config(packed, tmp_path, "adapter.train_norms=true", "noise.enabled=false", steps=2)
    run = start(config, "tiny").run_dir
    assert all(row["mismatch_kl"] < 1e-8 for row in numbers(run))
    tensors, begun = read_adapter(run / "adapter")[0], stored(packed)
    norms = [name for name in begun if name.endswith("layernorm.weight")]
    assert len(norms) == (8 if "linear_num_key_heads" in read_json(packed / "config.json") else 2 * 4)
    assert not any(torch.equal(tensors[name], begun[name].to(tensors[name].dtype)) for name in norms)


def test_targets_of_linear_attention_belong_to_models_that_have_it(hybrid, nvfp4_base, tmp_path):
    chosen = ("adapter.targets=[in_proj_qkv,o_proj]", "noise.enabled=false")
    run = start(small_config(packed_beside(hybrid), tmp_path, *chosen, steps=1), "tiny").run_dir
    assert len(read_adapter(run / "adapter")[0]) == 2 * (3 + 1)
    with pytest.raises(ConfigError, match=r"in_proj_qkv are of linear attention, which .* has not"):
        start(small_config(nvfp4_base, tmp_path, *chosen, steps=1, out="other"), "tiny")


def test_runs_with_vllm_are_planned_with_their_states_and_8_bit_keys_beside_them_refused(hybrid, here):
    packed = packed_beside(hybrid)
    planned = "plan", "--recipe", "tiny", "--gpu", "24", "--model"
    code, stdout, stderr = here(*planned, packed)
    assert (code, stderr) == (0, "")
    assert re.search(r"The KV cache holds \d+ tokens: \d+ completions .* each with 0 MiB of states\.", stdout)
    few, fp8 = ("--set", "data.limit=16"), ("--set", "rollout.kv_cache_dtype=fp8")
    with_vllm = "--set", "rollout.engine=vllm", *fp8
    for shown in (
        here(*planned, packed, "--set", "rollout.engine=auto", *fp8),  # which is vllm on a card
        here(*planned, packed, *with_vllm),
        here("train", *planned[1:3], "--dry-run", "--model", packed, *few, *with_vllm),
    ):
        assert shown[0] != 0
        assert "write rollout.kv_cache_dtype: auto in place of fp8" in shown[2]
    assert here(*planned, "tiny", *with_vllm)[0] == 0
    code, stdout, stderr = here("plan", "--recipe", "sft_tiny", "--model", packed, "--gpu", "24")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("Fits")


def test_gemma_is_planned_with_windows(gemma):
    """31B: 800 KiB per token in layers with a window of 1,024 tokens, and 80 KiB in the others."""
    gemma31, card = read_sizes("google/gemma-4-31B-it"), card_of("h100")
    assert gemma31.seen_tokens(1000) == 1000
    assert gemma31.seen_tokens(1024 + 1100) == 1024 + 1100 * 80 / 880
    assert gemma31.cached_tokens(1024 + 1084) == 1024 + 1100 * 80 / 880
    found = plan(load_recipe("dapo_7b", ["model.base=google/gemma-4-31B-it"]), gemma31, card)
    assert found.cache_tokens == int(found.memory["rollout"]["KV cache"] / 880 / 1024)
    found = plan(load_recipe("sft_tiny", ["model.base=google/gemma-4-31B-it"]), gemma31, card)
    assert not found.problems
