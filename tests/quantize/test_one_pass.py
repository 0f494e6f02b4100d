"""`qerl quantize` by default, end to end: one pass that searches scales, rounds by GPTQ and computes the start."""

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import START, BaseStart, base_digest, check_start, read_start
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.shards import TensorReader
from qerl.checkpoint.source import read_source
from qerl.formats import NVFP4
from quantize import one_pass, rounding
from quantize.calibration import load_calibration
from quantize.one_pass import Searched, Start, add_products_, one_pass_groups, searched, searched_groups
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, LAYOUTS, make_checkpoint
from tests.helpers.checkpoint_tensors import load_all

CPU = torch.device("cpu")
LENGTH, SIZE, RANK = 48, 24, 8

pytestmark = pytest.mark.usefixtures("one_thread")


def options(rows, method="auto", **values):
    asked = {"calibration": rows, "calibration_size": SIZE, "sequence_length": LENGTH, "start_rank": RANK, **values}
    return QuantizeOptions(method, **asked)


def quantized(folder, layout, rows):
    """(source folder, output folder, report) by the default method, with a start."""
    source = make_checkpoint(folder / "model", layout)
    return source, folder / "out", quantize_checkpoint(str(source), folder / "out", options(rows))


@pytest.fixture(scope="module", params=LAYOUTS)
def of_each_layout(request, rows, tmp_path_factory):
    return quantized(tmp_path_factory.mktemp(request.param), request.param, rows)


@pytest.fixture(scope="module")
def made(rows, tmp_path_factory):
    return quantized(tmp_path_factory.mktemp("made"), "qwen2", rows)


def linears(folder):
    return [name.removesuffix(".weight") for name in load_all(folder) if name.endswith("_proj.weight")]


def decoded(folder):
    tensors = load_all(folder)
    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith("weight_packed")]
    parts = {name: {part: tensors[f"{name}.{part}"] for part in NVFP4.tensors} for name in names}
    return {name: NVFP4.dequantize(each, torch.float32) for name, each in parts.items()}


def moments_by_transformers(source, rows):
    """R of every linear's inputs, from hooks on the whole 16-bit model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    sequences = load_calibration(rows, load_tokenizer(source), SIZE, LENGTH, 16).sequences
    found = {}
    for name in linears(source):

        def keep(_, given, name=name):
            x = given[0].double().flatten(0, -2)
            found[name] = x.T @ x / len(x)

        model.get_submodule(name).register_forward_pre_hook(keep)
    with torch.no_grad():
        model(torch.tensor(sequences))
    return found


def squares(wrong, moment):
    return float(((wrong.double() @ moment) * wrong.double()).sum())


# --- weights


def test_the_method_is_gptq_on_searched_scales_and_the_outputs_are_nearer_than_by_rounding(of_each_layout):
    report = of_each_layout[2]
    assert report.method == "search_gptq"
    written, rounded = report.outputs.linears, report.outputs.rounded_linears
    assert sum(written.values()) < 0.8 * sum(rounded.values())
    assert report.outputs.started.kl < report.outputs.written.kl < report.outputs.rounded.kl


def test_each_linear_is_rounded_under_the_moment_of_its_inputs_in_the_16_bit_model(made, rows):
    source, out, _ = made
    moments, dense, written = moments_by_transformers(source, rows), load_all(source), load_all(out)
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        modules = [f"model.layers.1.self_attn.{name}" for name in names]
        weights = [dense[f"{module}.weight"] for module in modules]
        scale, moment = rounding.roomy_global_scale(weights), moments[modules[0]].float()
        stacked = torch.cat(weights)
        expected = rounding.gptq(stacked, rounding.searched_scales(stacked, scale, moment.diagonal()), scale, moment)
        ours = torch.cat([written[f"{module}.weight_scale"].view(torch.uint8) for module in modules])
        assert (ours == expected.block_scale.view(torch.uint8)).float().mean() > 0.99
        ours = torch.cat([written[f"{module}.weight_packed"] for module in modules])
        assert (ours == expected.packed).float().mean() > 0.9  # sums in another order: a few fall the other way
        assert {float(written[f"{module}.weight_global_scale"]) for module in modules} == {float(scale)}


def test_without_rows_scales_are_searched_by_plain_squares(made, tmp_path):
    source = made[0]
    report = quantize_checkpoint(str(source), tmp_path / "out", QuantizeOptions(calibration="none"))
    assert (report.method, report.outputs, report.start, report.calibration) == ("search", None, None, None)
    assert not (tmp_path / "out" / START).exists()
    dense, written = load_all(source), load_all(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj"
    weight = dense[f"{name}.weight"]
    scale = rounding.roomy_global_scale([weight])
    expected = rounding.round_to(weight, rounding.searched_scales(weight, scale), scale)
    for part, tensor in expected.named().items():
        assert torch.equal(written[f"{name}.{part}"].view(torch.uint8), tensor.view(torch.uint8))
    plain = quantize_checkpoint(str(source), tmp_path / "rtn", QuantizeOptions("rtn", calibration="none"))
    assert report.mean_sqnr_db() > plain.mean_sqnr_db() + 0.3


# --- the start


def test_the_start_is_the_best_of_its_rank_for_what_was_written(made, rows):
    source, out, report = made
    moments, dense, quantized = moments_by_transformers(source, rows), load_all(source), decoded(out)
    factors = read_start(BaseStart(out / START, RANK))
    assert {name.removesuffix(".lora_A.weight") for name in factors if "lora_A" in name} == set(linears(source))
    for name in linears(source):
        error = dense[f"{name}.weight"].float() - quantized[name]
        values, vectors = torch.linalg.eigh(moments[name])
        root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        left = torch.linalg.svdvals(error.double() @ root).square()
        a, b = (factors[f"{name}.lora_{factor}.weight"].float() for factor in "AB")
        assert a.dtype == torch.float32
        assert squares(error - b @ a, moments[name]) == pytest.approx(float(left[RANK:].sum()), rel=0.02)
    assert report.start["rank"] == RANK
    assert 0.3 < report.start["rate_ratio"] < 10


def test_the_start_is_a_plain_adapter_of_this_base(of_each_layout):
    source, out, report = of_each_layout
    tensors, scaling = read_adapter(out / START)
    assert scaling == 1.0
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    check_start(BaseStart(out / START, RANK), str(out))
    about = json.loads((out / START / "start.json").read_text())
    assert about["source"] == str(source)
    assert about["base_digest"] == base_digest(out)
    assert about["rate_ratio"] == report.start["rate_ratio"]
    assert about["calibration"]["tokens"] == SIZE * LENGTH


def test_peft_computes_what_was_measured(made, rows):
    """Stock PEFT on the decoded model, over the held-out rows: the report's KL with the start."""
    from peft import PeftModel

    source, out, report = made
    tokens = torch.tensor(load_calibration(rows, load_tokenizer(source), SIZE, LENGTH, 16).held_out)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, weight in decoded(out).items():
        policy.get_submodule(name).weight.data.copy_(weight)
    with torch.no_grad():
        p = dense(tokens).logits[:, :-1].log_softmax(-1)
        q = policy(tokens).logits[:, :-1].log_softmax(-1)
        started = PeftModel.from_pretrained(policy, out / START)(tokens).logits[:, :-1].log_softmax(-1)
    found = [float((p.exp() * (p - each)).sum(-1).mean()) for each in (q, started)]
    assert found == pytest.approx([report.outputs.written.kl, report.outputs.started.kl], rel=1e-2)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_other_methods_have_a_start_of_what_they_wrote(made, rows, tmp_path, method):
    report = quantize_checkpoint(str(made[0]), tmp_path / "out", options(rows, method))
    plain = quantize_checkpoint(str(made[0]), tmp_path / "plain", options(rows, method, start_rank=0))
    ours, theirs = load_all(tmp_path / "out"), load_all(tmp_path / "plain")
    assert all(torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items())
    assert report.outputs.started.kl < 0.8 * report.outputs.written.kl
    assert report.outputs.written.kl == pytest.approx(plain.outputs.written.kl)
    assert plain.outputs.started is None
    assert not (tmp_path / "plain" / START).exists()


def test_linears_that_stay_in_16_bits_have_factors_of_zero_where_their_kind_is_quantized_elsewhere(
    made, rows, tmp_path
):
    ignore = (r"re:model\.layers\.1\.mlp.*", "re:.*self_attn.*")
    quantize_checkpoint(str(made[0]), tmp_path / "out", options(rows, ignore=ignore))
    factors = read_start(BaseStart(tmp_path / "out" / START, RANK))
    assert not any("self_attn" in name for name in factors)
    assert len(factors) == 2 * 2 * 3
    assert all(bool(tensor.any()) == ("layers.0" in name) for name, tensor in factors.items())
    check_start(BaseStart(tmp_path / "out" / START, RANK), str(tmp_path / "out"))


def test_a_start_that_cannot_be_read_back_leaves_nothing(made, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.checkpoint.base_start.digest_of", lambda tensors: object())
    with pytest.raises(CheckpointError, match="cannot be read back"):
        quantize_checkpoint(str(made[0]), tmp_path / "out", options(rows))
    assert list(tmp_path.iterdir()) == []


# --- experts


@pytest.fixture(scope="module", params=EXPERT_LAYOUTS)
def experts(request, rows, tmp_path_factory):
    return quantized(tmp_path_factory.mktemp(request.param), request.param, rows)


def test_experts_are_rounded_better_than_to_nearest_and_have_no_start(experts):
    _, out, report = experts
    assert report.global_scale == "pow2"
    assert all(math.frexp(layer.global_scale)[0] == 0.5 for layer in report.layers)
    written, rounded = report.outputs.linears, report.outputs.rounded_linears
    own = [name for name in written if ".experts." in name]
    assert len(own) == 2 * 4 * 3
    assert sum(written[name] for name in own) < 0.85 * sum(rounded[name] for name in own)
    factors = read_start(BaseStart(out / START, RANK))
    assert len(factors) == 2 * 2 * 4
    assert all("self_attn" in name for name in factors)
    check_start(BaseStart(out / START, RANK), str(out))


def test_an_expert_without_tokens_is_rounded_under_the_inputs_of_the_others():
    names = [f"model.layers.0.mlp.experts.{n}.down_proj" for n in range(3)]
    sums = one_pass.MomentSums([(name,) for name in names])
    x = [torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)) for tokens in (5, 9)]
    for name, inputs in zip(names, x, strict=False):
        sums.see(name, inputs)
    together = torch.cat(x)
    assert torch.allclose(sums.moments()[names[2]], together.T @ together / 14, atol=1e-5)


# --- sums, rows and what is refused


def test_sums_of_16_bit_inputs_are_exact():
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        sums = torch.ones(32, 32)
        add_products_(sums, x.to(dtype))
        exact = x.to(dtype).double()
        assert torch.allclose(sums.double(), 1 + exact.T @ exact, rtol=1e-5, atol=1e-5)


def test_rows_in_batches_give_the_same_as_one_by_one(made, rows, monkeypatch):
    source = read_source(str(made[0]))
    sequences = load_calibration(rows, load_tokenizer(source.folder), 7, LENGTH).sequences
    found = []
    for tokens in (LENGTH, 3 * LENGTH):  # one row at a time; three, three and one
        monkeypatch.setitem(one_pass.BATCH_TOKENS, "cpu", tokens)
        kept = {}

        def write(names, weights, moments, kept=kept):
            kept.update(moments)
            return {}

        with TensorReader(source.tensors) as read:
            assert all(group == {} for group in one_pass_groups(source, read, sequences, CPU, write))
        found.append(kept)
    assert len(found[0]) == 8  # four distinct inputs in each layer
    for name, moment in found[0].items():
        assert torch.allclose(found[1][name], moment, rtol=1e-4, atol=1e-4 * float(moment.diagonal().mean()))


def test_fewer_tokens_than_inputs_are_a_warning(made, rows, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    quantize_checkpoint(str(made[0]), tmp_path / "out", options(rows, calibration_size=2))
    assert "96 calibration tokens are fewer than the 112 inputs of the widest linear" in caplog.text
    assert "--calibration-size" in caplog.text


def test_inputs_that_overflow_are_named_and_leave_nothing(rows, tmp_path):
    source = make_checkpoint(tmp_path / "model", "qwen2", dtype="float32")
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name == "model.layers.1.input_layernorm.weight":
                tensors[name] *= 1e30  # whose squares are more than float32 can hold
        save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the inputs of model\.layers\.1\.self_attn\.q_proj hold NaN or inf"):
        quantize_checkpoint(str(source), tmp_path / "out", options(rows))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_moment_that_gptq_cannot_use_is_named(made):
    source = read_source(str(made[0]))
    with TensorReader(source.tensors) as read:
        names = source.groups()[1]
        weights = {name: read(name) for name in names}
    moments = {modules[0]: -torch.eye(weights[f"{modules[0]}.weight"].shape[1]) for modules in source.fused_sets()[:4]}
    with pytest.raises(CheckpointError, match=r"GPTQ cannot use the inputs of model\.layers\.0\.mlp\.down_proj"):
        searched(source, Searched(gptq=True))(names, weights, moments)


def test_a_weight_that_is_not_finite_is_named_without_rows_too(made, tmp_path):
    source = read_source(str(made[0]))

    def read(name):
        with TensorReader(source.tensors) as reader:
            tensor = reader(name)
        return tensor / 0 if name == "model.layers.1.mlp.up_proj.weight" else tensor

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        list(searched_groups(source, read, CPU, Searched()))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"start_rank": -1}, "--start-rank -1 is not a rank"),
        ({"start_rank": 8, "calibration": "none"}, "--start-rank 8 needs calibration rows, and there are none"),
        ({"method": "search_gptq", "calibration": "none"}, "--method search_gptq needs calibration rows"),
        ({"calibration": "none", "calibration_size": 4}, "--calibration-size 4 needs calibration rows"),
        ({"scheme": "fp8_block", "start_rank": 8}, "--start-rank 8 is not of --scheme fp8_block"),
        ({"scheme": "fp8_block", "method": "search"}, "--method search is not of --scheme fp8_block, which rounds"),
        ({"scheme": "fp8_block", "global_scale": "pow2"}, "--global-scale pow2 is not of --scheme fp8_block"),
        ({"scheme": "fp8_block", "scales": "int"}, "--scales 'int' is not known: write pow2, fp32"),
        ({"scheme": "nvfp4", "scales": "fp32"}, "--scales fp32 is not of --scheme nvfp4"),
        ({"observer": "imatrix_mse"},
         "--observer imatrix_mse is of llm-compressor's rtn and gptq, not of --method auto"),
        ({"observer": "mse", "method": "gptq"}, "--observer 'mse' is not known: write memoryless_minmax"),
        ({"observer": "memoryless_mse", "method": "rtn", "global_scale": "pow2"}, "leave one of them out"),
        ({"observer": "imatrix_mse", "method": "rtn", "calibration": "none"},
         "--observer imatrix_mse needs calibration"),
        ({"method": "rnt"}, "--method 'rnt' is not known: write auto, search, search_gptq, rtn"),
        ({"global_scale": "power"}, "--global-scale 'power' is not known: write auto, amax, pow2"),
        ({"method": "awq", "calibration": "none"}, "--method awq needs calibration rows"),
        ({"method": "awq", "calibration": "x", "calibration_size": 0}, "--calibration-size 0 must be at least 1"),
        ({"method": "gptq", "calibration": "x", "batch_size": -1}, "--batch-size -1 must be at least 1"),
        ({"method": "gptq", "calibration": "x", "sequence_length": 2048}, "is more than the model's 256 positions"),
        ({"device": "cuda:77"}, "--device cuda:77 cannot be used here"),
        ({"device": "gpu"}, "--device gpu cannot be used here"),
        ({"activations": "static", "calibration": "none"}, "--activations static needs calibration rows"),
        ({"activations": "static", "scheme": "fp8_block"},
         "--activations static is not of --scheme fp8_block, .* dynamic scales"),
        ({"activations": "dynamic", "method": "awq", "calibration": "gsm8k"}, "--method gptq or rtn"),
        ({"activations": "int8"}, "--activations 'int8' is not known: write auto, none, dynamic, static"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(made, tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        quantize_checkpoint(str(made[0]), tmp_path / "out", QuantizeOptions(**values))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("real", "data"), [(100, "mixed"), (1000, "arith")])
def test_the_shipped_rows_are_the_default_for_a_tokenizer_of_text(tmp_path, monkeypatch, real, data):
    monkeypatch.setattr("quantize.run.REAL_TOKENS", real)
    source = make_checkpoint(tmp_path / "model", "llama", layers=1)
    report = quantize_checkpoint(str(source), tmp_path / "out", QuantizeOptions("search"))
    assert report.calibration["data"] == data
    assert (report.calibration["sequences"], report.calibration["sequence_length"]) == (64, 256)
    assert report.outputs.sequences == 16
    assert report.start["rank"] == 32


def test_the_start_collects_medians_over_linears():
    start = Start(4)
    start.ratios = [3.0, 1.0, 2.0]
    assert start.rate_ratio == 2.0
    assert Start(4).rate_ratio is None
