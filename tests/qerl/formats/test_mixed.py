"""Bases with a format for each linear, and folders of NVIDIA's ModelOpt: opened as they are, trained and merged."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl import formats
from qerl.base.errors import CheckpointError, EngineError
from qerl.checkpoint.activations import kind_of_activations
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.folder import format_of, weights_digest
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import MODELOPT_CONFIG
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.opening import Settings, check_folder
from qerl.engine.vllm.sync import text_alone
from qerl.formats.fp8 import format as fp8
from qerl.formats.linear import PackedLinear
from qerl.plan.sizes import read_sizes
from quantize.export.options import ExportOptions
from quantize.export.run import REPACKED, export
from tests.helpers.bases import write_base
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.mixed import GROUPS, W4A4, W4A16, W8A8, with_pictures, write
from tests.helpers.model_folders import edited
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.small_sft import small_sft
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(24).view(2, 12)
OWN = {
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    },
}


def where(mlp=None, attention=None, head=None):
    """Which algorithm a linear is in, as vendors choose it; the small parts of linear attention stay in 16 bits."""

    def algorithm_of(module):
        if module == "lm_head":
            return head
        if module.endswith(("in_proj_a", "in_proj_b", "embed_tokens")):
            return None
        return mlp if ".mlp." in module else attention

    return algorithm_of


LAYOUTS = {  # family, algorithms, writer, the format that it is
    "nvidia/Qwen3.6-27B": ("qwen3_5_text", where(W4A16, W8A8, W4A16), "modelopt", "mixed"),
    "nvidia/Qwen3.8-27B": ("qwen3_5_text", where(W4A4, W8A8, W4A4), "modelopt", "mixed"),
    "nvidia/Gemma-4-31B-IT": ("gemma4_text", where(W4A4), "modelopt", "nvfp4"),
    "nvfp4_mlp_only": ("qwen3", where(W4A4), "modelopt", "nvfp4"),
    "weights only": ("qwen2", where(W4A16, W4A16), "modelopt", "nvfp4"),
    "FP8 per tensor": ("llama", where(W8A8, W8A8), "modelopt", "fp8_block"),
    "llm-compressor": ("qwen2", where(W4A4, W8A8, W8A8), "compressed-tensors", "mixed"),
    "llm-compressor, FP8 per tensor": ("qwen3", where(W8A8, W8A8), "compressed-tensors", "fp8_block"),
}


def base_of(family, folder):
    sizes = {"tie_word_embeddings": False, "intermediate_size": 320}
    return write_base(folder, family, hidden=128, **sizes, **OWN.get(family, {}))


def dense(base, means, out):
    """The 16-bit folder with the weights that a packed one means, in float32."""
    shutil.copytree(base, out)
    for file in out.glob("*.safetensors"):
        file.unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_all(base).items()}
    save_file(tensors | {f"{name}.weight": mean.float() for name, mean in means.items()}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_opened_as_its_writer_meant_it(layout, tmp_path, caplog):
    family, algorithm_of, writer, name = LAYOUTS[layout]
    base = base_of(family, tmp_path / "base")
    folder = tmp_path / "packed"
    means = write(base, folder, algorithm_of, writer, only_beside=layout == "weights only")
    if layout.startswith("nvidia/"):
        with_pictures(folder, family.removesuffix("_text"))
    assert format_of(folder) is formats.get(name)
    ref = resolve_model(str(folder))
    assert (ref.kind, ref.format) == ("quantized", name)
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, name, "float32")
        load_model(folder, name, "float32")
    packed = {module: each for module, each in model.named_modules() if isinstance(each, PackedLinear)}
    assert packed.keys() == means.keys() - {"lm_head"}
    for module, linear in packed.items():
        assert torch.equal(linear.unpack(torch.float32), means[module].float()), module
    if "lm_head" in means:
        assert torch.equal(model.lm_head.weight, means["lm_head"].float())
    static = name == "nvfp4" and layout != "weights only"
    assert all((linear.activations is not None) == static for linear in packed.values())
    dropped = [each for each in caplog.records if "inputs stay in 16 bits" in each.message]
    assert len(dropped) == (name != "nvfp4")
    if not static:
        twin = load_model(dense(base, means, tmp_path / "dense"), "bf16", "float32")
        assert torch.equal(model(IDS).logits, twin(IDS).logits)


@pytest.mark.parametrize("writer", ["modelopt", "compressed-tensors"])
def test_a_scale_may_be_any_number(writer, tmp_path):
    """FP8 is exact; of NVFP4 the scale of the tensor is inverted, and each of three products rounds in float32."""
    base, folder = base_of("qwen3", tmp_path / "base"), tmp_path / "packed"
    means = write(base, folder, where(W4A16, W8A8), writer, round_scale=lambda value: value)
    model = load_model(folder, "mixed", "float32")
    for module, mean in means.items():
        found, exact = model.get_submodule(module).unpack(torch.float32), "self_attn" in module
        torch.testing.assert_close(found, mean.float(), rtol=0 if exact else 2**-21, atol=0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A ModelOpt folder of Qwen3 with the MLP in NVFP4 and attention and head in other formats."""
    folder = tmp_path_factory.mktemp("mixed")
    base = base_of("qwen3", folder / "base")
    write(base, folder / "packed", where(W4A16, W8A8, W4A16))
    return folder / "packed"


def test_a_folder_whose_fused_linears_differ_is_refused(tmp_path):
    for number, odd in enumerate(("q_proj", "up_proj", "layers.0.linear_attn.in_proj_z")):
        base = base_of("qwen3_5_text" if number == 2 else "qwen3", tmp_path / f"base{number}")

        def algorithm_of(module, odd=odd):
            usual = where(W4A16, W8A8)(module)
            return {W4A16: W8A8, W8A8: W4A16, None: None}[usual] if module.endswith(odd) else usual

        write(base, tmp_path / f"packed{number}", algorithm_of)
        with pytest.raises(CheckpointError, match=f"{odd} in (NVFP4|FP8).* engines multiply by them at once"):
            resolve_model(str(tmp_path / f"packed{number}"))
    write(base, tmp_path / "part", lambda module: None if module.endswith("k_proj") else where(W4A16, W8A8)(module))
    with pytest.raises(CheckpointError, match=r"k_proj in 16-bit, .*v_proj in FP8"):
        load_model(tmp_path / "part", "mixed", "float32")
    write(base, tmp_path / "pure", lambda module: None if module.endswith("k_proj") else where(W4A16, W4A16)(module))
    with pytest.raises(CheckpointError, match=r"k_proj in 16-bit, .*v_proj in NVFP4"):
        resolve_model(str(tmp_path / "pure"))


def test_other_groups_and_scales_per_channel_are_refused_by_name(mixed, tmp_path):
    folder = shutil.copytree(mixed, tmp_path / "other")
    other = "pack-quantized, and in such a folder qerl reads nvfp4-pack-quantized and float-quantized"
    channel = r"per channel \(fp8_channel\), .* run `qerl quantize --scheme fp8_block` on the model"
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    block = {"weights": fp8.WEIGHTS, "input_activations": fp8.INPUTS}
    with pytest.raises(CheckpointError, match="rounds inputs of FP8 linears per tensor and in groups of 128"):
        formats.FP8_BLOCK.check_config(
            folder, {"quant_method": "compressed-tensors", "config_groups": {"a": GROUPS[W8A8], "b": block}}
        )
    for changes, message in (({"format": "pack-quantized"}, other), ({"weights": weights}, channel)):
        given = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
        edited(folder, quantization_config=given | {"config_groups": {"g": GROUPS[W8A8] | changes}})
        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(folder))
    with pytest.raises(CheckpointError, match="16-bit weights, and qerl makes no folder in mixed NVFP4 and FP8"):
        resolve_model(str(mixed.parent / "base"), "mixed")
    with pytest.raises(
        CheckpointError,
        match=r"holds mixed .* not NVFP4: write `qerl eval --load mixed`, in a recipe model\.format: mixed",
    ):
        resolve_model(str(mixed), "nvfp4")


def test_the_config_beside_counts(mixed, tmp_path):
    base, packed = mixed.parent / "base", tmp_path / "packed"
    write(base, packed, where(W4A4, None, W8A8), only_beside=True)
    digest, beside = weights_digest(packed), packed / MODELOPT_CONFIG
    assert kind_of_activations(packed, formats.NVFP4) == "static"
    given = beside.read_text()
    beside.write_text(given.replace('"NVFP4"', '"W4A16_NVFP4"'))
    assert weights_digest(packed) != digest
    load_model(packed, "nvfp4", "float32")  # the scales of inputs in its files are left out
    beside.write_text(given)
    edited(packed, lambda own: {name: own[name] for name in own if ".mlp." not in name or "input_scale" not in name})
    assert kind_of_activations(packed, formats.NVFP4) == "none"  # the head's scale says nothing of other linears
    shutil.move(packed / "model.safetensors", packed / "model-1-of-2.safetensors")  # as after half a download
    weights = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert format_of(packed) is formats.NVFP4
    for left_over in (given, given[:20]):
        decoded = shutil.copytree(base, tmp_path / f"decoded{len(left_over)}")
        (decoded / MODELOPT_CONFIG).write_text(left_over)
        assert resolve_model(str(decoded)).format == "bf16"


def changed(name, change):
    """What gives a folder's tensors with another one of this name, or without it."""
    return lambda own: {key: own[key] for key in own if key != name} | ({name: change(own[name])} if change else {})


UP, HEAD = "model.layers.0.mlp.up_proj", "lm_head"
DAMAGED = {
    "two scales": (
        changed(f"{UP}.weight_scale_2", lambda own: own.repeat(2)),
        r"up_proj.weight_global_scale is \[2\]",
    ),
    "two scales of the head": (changed(f"{HEAD}.weight_scale_2", lambda own: own.repeat(2)), "lm_head.weight cannot"),
    "no scale": (changed(f"{UP}.weight_scale_2", None), r"has no .*up_proj\.weight_scale_2 \(1 linears"),
    "AWQ": (lambda own: own | {f"{UP}.pre_quant_scale": torch.ones(128)}, "smoothed by AWQ"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tensors_are_named(damage, mixed, tmp_path):
    change, message = DAMAGED[damage]
    with pytest.raises(CheckpointError, match=message):
        load_model(edited(shutil.copytree(mixed, tmp_path / "damaged"), change), "mixed", "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32, and qerl reads 16"),
        ({"quant_algo": "MIXED_PRECISION"}, "does not say how each linear is .quantized_layers"),
        ({"quant_algo": ["NVFP4"]}, "cannot be read"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "reads NVFP4, W4A16_NVFP4, FP8, FP8_PB_WO: give the model"),
    ],
)
def test_an_algorithm_that_is_not_read_is_refused(changes, message, mixed, tmp_path):
    folder = shutil.copytree(mixed, tmp_path / "other")
    with pytest.raises(CheckpointError, match=message):
        format_of(edited(folder, quantization_config={"quant_method": "modelopt_fp4"} | changes))


def test_one_scale_of_a_tensor_of_blocks_has_any_shape(mixed, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    folder = edited(shutil.copytree(mixed, tmp_path / "wide"), changed(name, lambda own: own.reshape(1, 1, 1, 1)))
    found, own = (load_model(each, "mixed", "float32")(IDS).logits for each in (folder, mixed))
    assert torch.equal(found, own)


def test_a_plan_counts_each_linear(mixed):
    sizes = read_sizes(str(mixed))
    mlp, attention = 3 * 128 * 320, 2 * 128 * 128 + 2 * 64 * 128
    scales = 4 * 4  # of FP8: one block in each
    assert sizes.measured["mixed"] * sizes.body == 2 * (mlp * 9 / 16 + attention + scales)
    assert sizes.weights_bytes("mixed") < sizes.weights_bytes("bf16")


BY_NAME = "is known by its name alone: all its linears are counted as NVFP4 weights, whatever its files hold"
NAMES = {"nvidia/Qwen3.6-27B-NVFP4": 1, "Qwen/Qwen3-8B-FP8": 1, "Qwen/Qwen3-8B": 0}


@pytest.mark.parametrize("gpu", ["h100", "8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_by_the_name_of_a_quantized_model_says_what_it_cannot_know(here, name, gpu):
    _, stdout, _ = here("plan", "--model", name, "--gpu", gpu)
    assert stdout.count(f"{name} {BY_NAME}; for a plan of those, give its folder.") == NAMES[name]


def test_a_folder_is_planned_in_its_own_format_alone(here, mixed, nvfp4_base):
    short = ("--set", "rollout.max_new_tokens=64", "--set", "data.max_prompt_tokens=64", "--gpu", "24")
    code, _, stderr = here("plan", "--model", mixed, *short)
    assert (code, f"{mixed} holds mixed NVFP4 and FP8 weights, not NVFP4" in stderr) == (2, True)
    code, stdout, _ = here("plan", "--model", mixed, *short, "--set", "model.format=mixed")
    assert (code, BY_NAME in stdout) == (0, False), stdout
    assert here("plan", "--model", nvfp4_base, *short)[0] == 0


def test_vllm_is_told_of_each_linear_and_gets_our_tensors(mixed, tmp_path, monkeypatch):
    settings = Settings(str(mixed), "mixed", EngineOptions())
    found = settings.overrides()["quantization_config"]
    assert found["linears"]["model.layers.1.mlp.up_proj"] == "nvfp4"
    assert found["linears"]["model.layers.1.self_attn.q_proj"] == "fp8_block"
    assert len(found["linears"]) == 14
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))  # inputs in 16 bits need no FP8
    with pytest.raises(EngineError, match="k_proj is 64 x 128, and vLLM takes FP8"):
        check_folder(mixed, formats.get("mixed"), "marlin")
    means = write(mixed.parent / "base", tmp_path / "pure", where(W4A4, None, W4A4))
    settings = Settings(str(tmp_path / "pure"), "nvfp4", EngineOptions())
    found = settings.overrides()["quantization_config"]
    assert {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"} < set(found["ignore"])
    assert set(found["ignore"]).isdisjoint(means.keys() - {"lm_head"})
    assert formats.NVFP4.activations(found) == "static"
    stored = load_file(tmp_path / "pure" / "model.safetensors")
    kept = sum(tensor.nbytes for name, tensor in stored.items() if not name.startswith("lm_head"))
    assert settings.weights == kept + 2 * means["lm_head"].numel()
    write(mixed.parent / "base", tmp_path / "own", where(W4A16), "compressed-tensors")
    assert Settings(str(tmp_path / "own"), "nvfp4", EngineOptions()).overrides() == {}
    with text_alone(tmp_path / "own") as given:
        assert given == {}
    with_pictures(shutil.copytree(mixed, tmp_path / "whole"), "qwen3_vl")
    whole, alone = (Settings(str(folder), "mixed", EngineOptions()) for folder in (tmp_path / "whole", mixed))
    assert (whole.served["linears"], whole.weights) == (alone.served["linears"], alone.weights)
    with text_alone(tmp_path / "whole") as given:
        found = json.loads((Path(given["hf_config_path"]) / "config.json").read_text())
        assert (found["model_type"], found["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert not Path(given["hf_config_path"]).exists()


def test_a_run_trains_resumes_and_merges_on_it(mixed, tmp_path):
    config = small_config(mixed, tmp_path, "model.format=mixed", "noise.enabled=false", "run.save_every=1", steps=2)
    run = start(config, "tiny").run_dir
    rows = numbers(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["mismatch_kl"] < 1e-8
    assert resolve_model(str(run)).format == "mixed"
    assert json.loads((run / "adapter" / "trained_on.json").read_text())["format"] == "mixed"
    whole = shutil.copytree(run / "adapter", tmp_path / "whole")
    assert numbers(resume(run, step=1).run_dir) == rows
    assert same_adapters(run / "adapter", whole)
    done = export(ExportOptions(str(run), "bf16", tmp_path / "merged", prompt_count=1, max_new_tokens=4))
    assert format_of(done.out) is formats.BF16
    assert not (done.out / "hf_quant_config.json").exists()
    found, tensors = load_all(done.out), read_adapter(run / "adapter")[0]
    model = load_model(mixed, "mixed", "float32")
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"):
        update = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"] * config.adapter.alpha
        own = model.get_submodule(module).unpack(torch.float32) + update / config.adapter.rank
        assert torch.equal(found[f"{module}.weight"], own.bfloat16())
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert not [name for name in found if "scale" in name]
    for to in ("nvfp4", "fp8_block"):  # whose inputs stay as they were trained
        done = export(ExportOptions(str(run), to, tmp_path / to, prompt_count=0))
        assert REPACKED.format("mixed NVFP4 and FP8", formats.get(to).label) in done.notes
        (group,) = json.loads((done.out / "config.json").read_text())["quantization_config"]["config_groups"].values()
        assert group["input_activations"] is None
    done = export(ExportOptions(str(run), "adapter", tmp_path / "adapter"))
    assert any("training left out" in note for note in done.notes)
    assert done.commands.keys() == {"chat"}
    card = (done.out / "README.md").read_text()
    assert "qerl merge" in card
    assert "CompressedTensorsConfig" not in card


def test_rows_are_trained_on_it(mixed, tmp_path):
    rows = numbers(start(small_sft(mixed, tmp_path, "model.format=mixed"), "sft").run_dir)
    assert rows[-1]["loss"] < rows[0]["loss"]
