"""Merging an adapter on experts: each expert's weights get its own share of the factors, by a sum written out here."""

import json

import pytest
import torch

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.experts import fused
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.source import read_source
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.greedy_tokens import arith_prompts, engine_tokens, library_tokens, same
from tests.helpers.merged import random_expert_adapter
from tests.helpers.moe import make_moe
from tests.helpers.roundings import ROUNDING

FORMAT = formats.DEFAULT
KINDS = [("shared", 4), ("per_expert", 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_moe(tmp_path_factory.mktemp("moe") / "base", layers=2, mlp_only_layers=[0])


@pytest.fixture(scope="module", params=KINDS, ids=[kind for kind, _ in KINDS])
def adapter(request, base, tmp_path_factory):
    return random_expert_adapter(tmp_path_factory.mktemp("adapter") / "adapter", base, *request.param)


def merged(adapter, base, to, out, **options):
    return export(ExportOptions(adapter=str(adapter), model=str(base), to=to, out=out, prompt_count=0, **options))


def by_hand(base, adapter):
    """The 16-bit weights with the adapter added in float32, for each linear of the second layer's experts."""
    tensors, scaling = read_adapter(adapter)
    dense, found = load_all(base), {}
    inside = "model.layers.1.mlp.experts"

    def factor(name, expert):
        tensor = tensors[f"{inside}.{name}.weight"].float()
        return tensor if tensor.ndim == 2 else tensor[expert]

    for expert in range(4):
        gate_up = factor("gate_up_proj.lora_B", expert) @ factor("gate_up_proj.lora_A", expert) * scaling
        down = factor("down_proj.lora_B", expert) @ factor("down_proj.lora_A", expert) * scaling
        gate, up = gate_up.split(48)
        for leaf, delta in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            name = f"{inside}.{expert}.{leaf}.weight"
            found[name] = dense[name].float() + delta
    return found


def test_a_16_bit_model_holds_every_expert_with_its_adapter(base, adapter, tmp_path):
    report = merged(adapter, base, "bf16", tmp_path / "out")
    written, expected = load_all(tmp_path / "out"), by_hand(base, adapter)
    assert len(expected) == 4 * 3
    for name, weight in expected.items():
        assert torch.equal(written[name], weight.bfloat16()), name
    assert torch.equal(written["model.layers.1.mlp.gate.weight"], load_all(base)["model.layers.1.mlp.gate.weight"])
    assert {layer.name for layer in report.layers} == {
        *(f"model.layers.{n}.self_attn.{part}_proj" for n in range(2) for part in "qkvo"),
        *(f"model.layers.1.mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")),
    }
    assert json.loads((tmp_path / "out" / "merge_report.json").read_text())["rank"] == 4


def test_transformers_alone_gives_the_tokens_of_base_and_adapter_from_a_merged_model(on_experts, tmp_path):
    from transformers import AutoModelForCausalLM

    base = resolve_model(str(on_experts)).base
    prompts = arith_prompts(base, 4)
    expected = engine_tokens(on_experts, prompts)
    assert same(expected, engine_tokens(base, prompts)) <= 1  # without the adapter it is another policy
    export(ExportOptions(str(on_experts), "bf16", tmp_path / "out", prompt_count=0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert library_tokens(model, prompts) == expected


def test_a_packed_model_has_shared_scales_and_the_adapter_in_it(base, adapter, tmp_path):
    quantize_checkpoint(str(base), tmp_path / "packed", ROUNDING)
    report = merged(adapter, tmp_path / "packed", "nvfp4", tmp_path / "out")
    written, expected = load_all(tmp_path / "out"), by_hand(base, adapter)
    decoder = read_source(str(base)).decoder
    for modules in fused(decoder.linears()):
        scales = {float(written[f"{module}.{FORMAT.shared_tensor}"]) for module in modules}
        assert len(scales) == 1, modules
    for name, weight in expected.items():
        module = name.removesuffix(".weight")
        decoded = FORMAT.dequantize({part: written[f"{module}.{part}"] for part in FORMAT.tensors}, torch.float32)
        assert (decoded - weight).norm() < 0.15 * weight.norm(), name
    assert report.survival.kept == pytest.approx(1, abs=0.1)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.layers.1.mlp.gate"]


def test_an_adapter_folder_is_the_same_in_pefts_layout(base, adapter, tmp_path):
    report = merged(adapter, base, "adapter", tmp_path / "out")
    (before, scaling), (after, same) = read_adapter(adapter), read_adapter(tmp_path / "out")
    assert scaling == same
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "vllm" not in report.commands
    assert "target_parameters" in report.notes[0]


def test_a_format_that_experts_cannot_be_in_is_refused_before_anything_is_written(base, adapter, tmp_path):
    with pytest.raises(ConfigError, match=r"--to fp8_block: .* does not hold: write --to bf16 or --to nvfp4"):
        merged(adapter, base, "fp8_block", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path):
    dense = make_moe(tmp_path / "dense", layers=2, mlp_only_layers=[0, 1])
    with pytest.raises(CheckpointError, match="changes experts, which the base has not"):
        merged(adapter, dense, "bf16", tmp_path / "out")
    more = make_moe(tmp_path / "more", layers=2, mlp_only_layers=[0], num_experts=8)
    with pytest.raises(CheckpointError, match=r"no adapter for model\.layers\.1\.mlp\.experts\.0\.gate_proj, one of 8"):
        merged(adapter, more, "bf16", tmp_path / "out")
    other = make_moe(tmp_path / "other", layers=2, mlp_only_layers=[1])
    with pytest.raises(CheckpointError, match=r"no adapter for model\.layers\.0\.mlp\.experts\.0\.gate_proj"):
        merged(adapter, other, "bf16", tmp_path / "out")
    assert not (tmp_path / "out").exists()
