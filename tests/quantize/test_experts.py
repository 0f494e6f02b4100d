"""Quantizing models with experts: every expert is packed, gate and up share a scale, and routers stay as they are."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.experts import decoder_of, fused
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.source import read_source
from qerl.checkpoint.verify import FailedCheck, verify
from qerl.engine.vllm.opening import check_folder
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, make_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.roundings import ROUNDING, rounding

FORMAT = formats.DEFAULT
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=EXPERT_LAYOUTS)
def made(request, tmp_path_factory):
    """(source folder, its packed folder, report) of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "base", request.param)
    return source, folder / "packed", quantize_checkpoint(str(source), folder / "packed", ROUNDING)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_every_expert_is_packed_and_the_rest_is_not(made):
    source, packed, report = made
    decoder = decoder_of(config_of(source), "m")
    dense, tensors = load_all(source), load_all(packed)
    assert set(FORMAT.quantized_linears(tensors)) == set(decoder.linears())
    for module in ("lm_head", "model.embed_tokens", *decoder.kept()):
        assert torch.equal(tensors[f"{module}.weight"], dense[f"{module}.weight"])
    assert config_of(packed)["quantization_config"]["ignore"] == ["lm_head", *decoder.kept()]
    assert len(report.layers) == 2 * (4 + 3 * 4)
    assert min(layer.sqnr_db for layer in report.layers) > 18


def test_the_bits_are_those_of_the_reference_under_a_shared_power_of_two(made):
    from qerl.formats.nvfp4.reference import quantize, shared_global_scale

    source, packed, _ = made
    dense, tensors = load_all(source), load_all(packed)
    for modules in fused(decoder_of(config_of(source), "m").linears()):
        scale = shared_global_scale([dense[f"{module}.weight"] for module in modules], "pow2")
        for module in modules:
            for part, tensor in quantize(dense[f"{module}.weight"], scale).named().items():
                assert torch.equal(tensors[f"{module}.{part}"], tensor), (module, part)


def test_experts_may_have_other_scales_than_their_neighbours(tmp_path):
    source = make_checkpoint(tmp_path / "base", "qwen3_moe", max_shard_size="10MB")
    tensors = load_all(source)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file(tensors | {name: tensors[name] * 64}, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(str(source), tmp_path / "packed", ROUNDING)
    scales = {layer.name.removeprefix("model.layers.0.mlp.experts."): layer.global_scale for layer in report.layers}
    assert scales["1.up_proj"] == scales["1.gate_proj"] < scales["1.down_proj"]
    assert scales["0.up_proj"] > scales["1.up_proj"]


def test_the_report_says_one_line_for_all_experts_of_a_layer(made):
    source, packed, report = made
    decoder = decoder_of(config_of(source), "m")
    entries = {entry["name"]: entry for entry in json.loads((packed / "quantize_report.json").read_text())["layers"]}
    assert len(entries) == 2 * (4 + 3)
    for number in range(2):
        for leaf in decoder.family.leaves:
            inside = f"model.layers.{number}.{decoder.family.block}.experts"
            own = [each for each in report.layers if each.name.startswith(inside) and each.name.endswith(f".{leaf}")]
            entry, worst = entries[f"{inside}.*.{leaf}"], min(own, key=lambda each: each.sqnr_db)
            assert entry["experts"] == len(own) == 4
            assert entry["sqnr_db"] == pytest.approx(sum(each.sqnr_db for each in own) / 4, abs=1e-3)
            assert (entry["lowest"], entry["lowest_sqnr_db"]) == (worst.name, pytest.approx(worst.sqnr_db, abs=1e-3))
            assert entry["global_scale"] == [min(e.global_scale for e in own), max(e.global_scale for e in own)]


# --- what is refused


def test_verify_refuses_gate_and_up_under_different_scales(made, tmp_path):
    source, packed, _ = made
    opened = read_source(str(source))
    expert = opened.decoder.experts_of(1)[2]
    broken = shutil.copytree(packed, tmp_path / "broken")
    tensors, dense = load_all(broken), load_all(source)
    scale = f"{expert.up}.{FORMAT.shared_tensor}"
    parts = FORMAT.quantize([dense[f"{expert.up}.weight"]], tensors[scale] / 2)[0]
    tensors |= {f"{expert.up}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FailedCheck, match=rf"{expert.gate}\.weight_global_scale is not that of {expert.up}"):
        verify(broken, opened, lambda name: dense[name], CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "fp8_block"}, "is a mixture of experts.*leave out --scheme and --activations"),
        ({"activations": "dynamic"}, "is a mixture of experts.*leave out --scheme and --activations"),
        ({"ignore": ("re:.*experts\\.1\\..*",)}, "9 linears., and engines multiply by them at once"),
        ({"ignore": ("re:.*experts\\.1\\.(up_proj|w3)$",)}, "1 linears., and engines multiply by them at once"),
    ],
)
def test_what_experts_cannot_be_is_refused(made, tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        quantize_checkpoint(str(made[0]), tmp_path / "out", QuantizeOptions(**options))
    assert not (tmp_path / "out").exists()


def test_all_experts_may_stay_in_16_bits(made, tmp_path):
    report = quantize_checkpoint(str(made[0]), tmp_path / "out", rounding(ignore=("re:.*experts.*",)))
    assert len(report.layers) == 2 * 4
    assert len(config_of(tmp_path / "out")["quantization_config"]["ignore"]) == 1 + 2 + 2 * 4 * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(name), r"lacks 1 of the tensors.*experts\.3\.down_proj\.weight"),
        (
            lambda tensors, name: tensors.update({name: torch.zeros(64, 32)}),
            r"experts\.3\.down_proj\.weight of shape \[64, 32\], and by",
        ),
    ],
    ids=["lost", "smaller"],
)
def test_a_wrong_expert_is_missed_before_anything_is_written(tmp_path, change, said):
    source = make_checkpoint(tmp_path / "base", "qwen3_moe", max_shard_size="10MB")
    tensors, name = load_all(source), "model.layers.1.mlp.experts.3.down_proj.weight"
    change(tensors, name)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        quantize_checkpoint(str(source), tmp_path / "out", ROUNDING)


# --- with calibration


def calibrating(rows, method):
    return QuantizeOptions(method=method, calibration=rows, calibration_size=4, sequence_length=24)


def test_gptq_packs_every_expert_better_than_rounding_does(rows, tmp_path):
    pytest.importorskip("llmcompressor", reason="the quantize extra is not installed")
    source = make_checkpoint(tmp_path / "base", "mixtral")
    report = quantize_checkpoint(str(source), tmp_path / "out", calibrating(rows, "gptq"))
    assert report.outputs.written.kl < report.outputs.rounded.kl
    scales = {layer.name: layer.global_scale for layer in report.layers}
    assert all(len({scales[module] for module in modules}) == 1 for modules in fused(scales))


def test_awq_rescales_the_router_with_the_norm_that_it_reads(rows, tmp_path):
    """Without that the experts are chosen by other numbers, and the model is another one before it is rounded."""
    pytest.importorskip("llmcompressor", reason="the quantize extra is not installed")
    from transformers import AutoModelForCausalLM

    from quantize.calibration import load_calibration
    from quantize.compressor import calibrate, dense_tensor

    folder = make_checkpoint(tmp_path / "base", "qwen3_moe", dtype="float32", mlp_only_layers=[0])
    source, tokenizer = read_source(str(folder)), load_tokenizer(folder)
    model = calibrate(
        source, tokenizer, load_calibration(rows, tokenizer, 4, 24, 4), QuantizeOptions("awq", global_scale="pow2")
    )
    rescaled = {name: dense_tensor(source, model, name).contiguous() for name in source.tensors}
    router = f"{source.decoder.kept()[0]}.weight"
    assert not torch.equal(rescaled[router], load_all(folder)[router])
    other = shutil.copytree(folder, tmp_path / "rescaled", ignore=shutil.ignore_patterns("model*"))
    save_file(rescaled, other / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(2, 40)[None]
    one, two = (AutoModelForCausalLM.from_pretrained(each)(ids).logits.detach() for each in (folder, other))
    assert torch.allclose(one, two, atol=1e-3 * float(one.std()))


# --- a folder that others made


def test_unequal_scales_of_an_expert_are_refused_when_a_folder_is_named(made, tmp_path):
    """A packed folder in which the up of one expert has another scale than its gate."""
    source, packed, _ = made
    folder, expert = shutil.copytree(packed, tmp_path / "other"), decoder_of(config_of(source), "m").experts_of(1)[2]
    tensors = load_all(folder)
    tensors[f"{expert.up}.{FORMAT.shared_tensor}"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        resolve_model(str(folder))
    words = f"gives {expert.gate}, {expert.up} different global scales"
    assert words in str(raised.value)
    assert "quantize the 16-bit model with `qerl quantize`" in str(raised.value)
    with pytest.raises(EngineError, match=words):
        check_folder(folder, FORMAT, "marlin")
