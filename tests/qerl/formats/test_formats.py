"""What the registered formats know, and that a registered name is taken once."""

import json

import pytest
import torch

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.formats import BF16, FP8_BLOCK, MIXED, NVFP4
from qerl.formats.nvfp4 import reference

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_formats_are_known_by_name_in_order():
    assert formats.names() == ("nvfp4", "fp8_block", "bf16", "mixed")
    assert formats.all_formats() == (NVFP4, FP8_BLOCK, BF16, MIXED)
    assert formats.writable() == (BF16, NVFP4, FP8_BLOCK)
    assert formats.get("nvfp4") is NVFP4 is formats.DEFAULT
    with pytest.raises(CheckpointError, match="format 'fp8' is not known: write 'nvfp4' or 'fp8_block' or 'bf16' or "):
        formats.get("fp8")
    with pytest.raises(ValueError, match="there is a format nvfp4 already"):
        formats.register(NVFP4)


def test_what_a_weight_takes_and_what_quantized_folders_are_called():
    found = [(each.bytes_per_weight, each.folder_suffix, each.quantized) for each in (NVFP4, FP8_BLOCK)]
    assert found == [(4 / 8 + 1 / 16, "-NVFP4A16", True), (1 + 4 / 128**2, "-FP8_BLOCK", True)]
    assert (BF16.bytes_per_weight, BF16.quantized) == (2, False)


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (None, BF16),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, NVFP4),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, None),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, FP8_BLOCK),
        (BLOCKS, FP8_BLOCK),
        ({"quant_method": "gptq"}, None),
        ({}, None),
    ],
)
def test_a_folder_is_recognised_by_its_quantization_config(quantization, found):
    assert [each for each in formats.all_formats() if each.recognises(quantization)] == ([found] if found else [])


def test_the_quantization_config_is_one_that_it_recognises(tmp_path):
    for format in (NVFP4, FP8_BLOCK):
        written = json.loads(json.dumps(format.quantization_config(["lm_head"])))
        assert [each for each in formats.all_formats() if each.recognises(written)] == [format]
        format.check_config(tmp_path, written)
        assert written["ignore"] == ["lm_head"]
    assert BF16.quantization_config(["lm_head"]) is None


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8"}, r"FP8 with \{'weight_block_size': None\}, and qerl reads FP8 with .*\[128, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"\[64, 128\]"),
        ({**BLOCKS, "activation_scheme": "static"}, "'activation_scheme': 'static'"),
        ({"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}, "channel"),
        ({"config_groups": []}, "cannot be read"),
    ],
)
def test_other_kinds_of_fp8_are_refused(tmp_path, quantization, message):
    given = {"quant_method": "compressed-tensors", "format": "float-quantized"} | quantization
    assert FP8_BLOCK.recognises(given)
    with pytest.raises(CheckpointError, match=message) as refused:
        FP8_BLOCK.check_config(tmp_path, given)
    assert "\n" not in str(refused.value)


def test_weights_that_are_fused_share_their_global_scale():
    torch.manual_seed(0)
    weights = [torch.randn(32, 64), 3 * torch.randn(16, 64)]
    first, second = NVFP4.quantize(weights)
    assert torch.equal(first[NVFP4.shared_tensor], second[NVFP4.shared_tensor])
    assert torch.equal(second[NVFP4.shared_tensor], reference.global_scale(weights[1].abs().amax()))
    for weight, tensors in zip(weights, (first, second), strict=True):
        assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
            "weight_packed": (torch.uint8, (len(weight), 32)),
            "weight_scale": (torch.float8_e4m3fn, (len(weight), 4)),
            "weight_global_scale": (torch.float32, (1,)),
        }
        assert NVFP4.dense_shape({name: tuple(t.shape) for name, t in tensors.items()}) == tuple(weight.shape)
        error = weight - NVFP4.dequantize(tensors, torch.float32)
        assert 20 * torch.log10(weight.norm() / error.norm()) > NVFP4.min_sqnr_db
