"""Names, shapes and checks of the packed tensors, compared with the safetensors headers of a real checkpoint."""

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.formats import NVFP4
from qerl.formats.nvfp4 import layout


def tensors(out_features=4, in_features=32):
    return {
        "weight_packed": torch.zeros(out_features, in_features // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(out_features, in_features // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }


def test_the_specs_of_a_down_proj_of_qwen():
    assert layout.tensor_specs(3584, 18944) == {
        "weight_packed": ("U8", (3584, 9472)),
        "weight_scale": ("F8_E4M3", (3584, 1184)),
        "weight_global_scale": ("F32", (1,)),
    }


@pytest.mark.parametrize(("out_features", "in_features"), [(4, 0), (4, 8), (4, 17), (4, 24), (0, 16), (4, -16)])
def test_sizes_without_a_packing_are_rejected(out_features, in_features):
    with pytest.raises(CheckpointError, match="multiple of 16"):
        layout.tensor_specs(out_features, in_features)


def test_quantized_linears_are_found_by_their_three_tensors():
    up = "model.layers.0.mlp.up_proj"
    names = ["model.norm.weight", f"{up}.weight_packed", "model.layers.0.self_attn.q_proj.bias"]
    names += [f"{up}.weight_global_scale", "model.layers.0.self_attn.q_proj.weight", f"{up}.weight_scale"]
    assert NVFP4.quantized_linears(names) == [up]


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight_packed", "a.weight_scale"],  # int4 pack-quantized has weight_shape instead of the global scale
        ["a.weight", "a.weight_scale"],  # fp8
        ["a.weight_packed", "a.weight_scale", "a.weight_global_scale", "a.weight"],
    ],
)
def test_a_module_with_some_of_the_tensors_is_an_error_that_names_it(names):
    with pytest.raises(CheckpointError, match=r"^a: has"):
        NVFP4.quantized_linears(names)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("weight_packed", torch.zeros(4, 16, dtype=torch.int8)),
        ("weight_packed", torch.zeros(64, dtype=torch.uint8)),
        ("weight_packed", torch.zeros(4, 12, dtype=torch.uint8)),
        ("weight_scale", torch.ones(4, 2)),
        ("weight_scale", torch.ones(4, 2).to(torch.float8_e5m2)),
        ("weight_scale", torch.ones(4, 1).to(torch.float8_e4m3fn)),
        ("weight_scale", torch.ones(2, 4).to(torch.float8_e4m3fn)),
        ("weight_global_scale", torch.tensor(1.0)),  # type promotion treats scalars differently
        ("weight_global_scale", torch.ones(2)),
        ("weight_global_scale", torch.ones(1, dtype=torch.bfloat16)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, wrong):
    with pytest.raises(CheckpointError, match=r"^layer"):
        layout.check_tensors({**tensors(), name: wrong}, "layer")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_block_scales_are_rejected(code):
    given = tensors()
    assert layout.check_tensors(given) == (4, 32)
    layout.check_values(given)
    given["weight_scale"].view(torch.uint8)[3, 1] = code
    with pytest.raises(CheckpointError, match="1 block scales are NaN"):
        layout.check_values(given)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_that_cannot_divide_is_rejected(scale):
    with pytest.raises(CheckpointError, match="finite and positive"):
        layout.check_values({**tensors(), "weight_global_scale": torch.tensor([scale])})
