"""A format that only this test registers opens, trains, is packed in place and merges, with no edit elsewhere."""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import describe, resolve_model
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import WeightsUpdate, deliver
from qerl.formats.base import Format, TensorSpec
from qerl.formats.linear import PackedLinear
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.small_run import numbers, small_config
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")

CODES, SCALE = "weight_codes", "row_scale"
ON_CPU = EngineOptions(engine="transformers", device="cpu")


def dequantized(codes, scale, dtype):
    return (codes.float() * scale).to(dtype)


def quantized(weight):
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {CODES: (weight.float() / scale).round().to(torch.int8), SCALE: scale}


class RowsLinear(PackedLinear):
    """8-bit integers, and a float32 factor for each row."""

    def empty_tensors(self, device):
        codes = torch.zeros(self.out_features, self.in_features, dtype=torch.int8, device=device)
        return {CODES: codes, SCALE: torch.ones(self.out_features, 1, device=device)}

    def unpack(self, dtype):
        return dequantized(self.weight_codes, self.row_scale, dtype)

    def write_(self, matrix, row_start=0):
        for part, tensor in quantized(matrix).items():
            getattr(self, part)[row_start : row_start + len(matrix)].copy_(tensor)
        self.drop_cached()


@dataclass(frozen=True)
class Int8Rows(Format):
    def recognises(self, quantization):
        return quantization is not None and quantization.get("quant_method") == self.name

    def tensor_specs(self, out_features, in_features):
        return {CODES: TensorSpec("I8", (out_features, in_features)), SCALE: TensorSpec("F32", (out_features, 1))}

    def dense_shape(self, shapes):
        return shapes[CODES]

    def linear(self):
        return RowsLinear

    def dequantize(self, tensors, dtype):
        return dequantized(tensors[CODES], tensors[SCALE], dtype)

    def quantize(self, weights, shared=None):
        return [quantized(weight) for weight in weights]

    def quantization_config(self, unquantized):
        return {"quant_method": self.name, "ignore": list(unquantized)}


INT8_ROWS = Int8Rows(
    name="int8_rows",
    label="INT8",
    folder_label="INT8 checkpoint",
    model_label="INT8 model",
    bytes_per_weight=1,
    tensors=(CODES, SCALE),
    min_sqnr_db=30.0,
)


@pytest.fixture(autouse=True)
def int8_rows():
    """It is registered for each test, and afterwards unknown again."""
    formats.register(INT8_ROWS)
    yield
    formats.unregister("int8_rows")
    with pytest.raises(CheckpointError, match="format 'int8_rows' is not known: write 'nvfp4' or "):
        formats.get("int8_rows")


@pytest.fixture
def folder(base, tmp_path):
    """The random base with every linear of its layers in 8 bits."""
    folder = shutil.copytree(base, tmp_path / "int8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = INT8_ROWS.quantization_config(["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_all(base)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in quantized(tensors.pop(name)).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, RowsLinear)}


def test_it_opens_as_the_model_of_its_dequantized_weights(folder, base):
    assert format_of(folder) is INT8_ROWS
    assert describe(resolve_model(str(folder))) == f"INT8 checkpoint {folder}"
    model, twin = load_model(folder, "int8_rows", "float32"), load_model(base, "bf16", "float32")
    packed = linears(model)
    assert len(packed) == 2 * 7
    for name, module in packed.items():
        twin.get_submodule(name).weight.data = dequantized(module.weight_codes, module.row_scale, torch.float32)
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(model(ids).logits, twin(ids).logits)
    with pytest.raises(CheckpointError, match="holds INT8 weights: load it with format int8_rows"):
        load_model(folder, "nvfp4", "float32")
    with pytest.raises(
        CheckpointError,
        match=r"not NVFP4: write `qerl eval --load int8_rows`, in a recipe model\.format: int8",
    ):
        resolve_model(str(folder), "nvfp4")


def test_a_sync_packs_whole_weights_in_place(folder):
    engine = open_engine(str(folder), "int8_rows", ON_CPU)
    packed = linears(engine.policy_model())
    before = {name: module.weight_codes.data_ptr() for name, module in packed.items()}
    prompts, sampling = [[3, 4, 5]], SamplingParams(8, temperature=0.0)
    first = engine.generate(prompts, sampling)
    torch.manual_seed(1)
    weights = {name: torch.randn(module.out_features, module.in_features) for name, module in packed.items()}
    assert deliver(WeightsUpdate(weights), engine) == len(packed)
    assert {name: module.weight_codes.data_ptr() for name, module in packed.items()} == before
    for name, module in packed.items():
        expected = quantized(weights[name])
        assert torch.equal(module.weight_codes, expected[CODES])
        assert torch.equal(module.row_scale, expected[SCALE])
    assert engine.generate(prompts, sampling)[0].logprobs != first[0].logprobs
    engine.close()


def test_it_trains_and_merges(folder, tmp_path):
    config = small_config(folder, tmp_path, "model.format=int8_rows", "noise.enabled=false", steps=2)
    run = start(config, "tiny").run_dir
    assert [row["step"] for row in numbers(run)] == [1, 2]
    assert numbers(run)[0]["mismatch_kl"] < 1e-8
    assert resolve_model(str(run)).format == "int8_rows"
    tensors, scaling = read_adapter(run / "adapter")
    assert any(tensor.abs().sum() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    packed = load_file(folder / "model.safetensors")

    def expected(module):
        update = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"] * scaling
        return dequantized(packed[f"{module}.{CODES}"], packed[f"{module}.{SCALE}"], torch.float32) + update

    modules = sorted(name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight"))
    assert len(modules) == 2 * 7
    dense = export(ExportOptions(str(run), "bf16", tmp_path / "bf16", prompt_count=0))
    assert format_of(dense.out) is formats.BF16
    found = load_file(dense.out / "model.safetensors")
    for module in modules:
        torch.testing.assert_close(found[f"{module}.weight"], expected(module).bfloat16(), rtol=0, atol=0)
    again = export(ExportOptions(str(run), "int8_rows", tmp_path / "int8-merged", prompt_count=1, max_new_tokens=4))
    assert (format_of(again.out), again.kind) == (INT8_ROWS, "INT8 model")
    found = load_file(again.out / "model.safetensors")
    for module in modules:
        for part, tensor in quantized(expected(module)).items():
            assert torch.equal(found[f"{module}.{part}"], tensor)
    assert again.effect.kept is not None
