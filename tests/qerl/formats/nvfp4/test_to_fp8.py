"""NVFP4 weights as transposed FP8 matrices: the kernel against its twin, and the twin against the dense weight rounded.

The kernel's tests passed on an H100 on 2026-11-26, before its scale included the factor alpha. On a machine without a
card `PYTHONPATH=.:T TRITON_INTERPRET=1 python -m pytest -m gpu` runs the kernel in Triton's interpreter, with triton in
the folder T.
"""

import os

import pytest
import torch

from qerl.formats.fp8.training import quantize_tensor
from qerl.formats.nvfp4 import decode, reference, slab_layout
from qerl.formats.nvfp4.decode import reference_decoded
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def weight_of(matrix, device="cpu"):
    scale = reference.shared_global_scale([matrix], "pow2", 2)
    tensors = reference.quantize(matrix, scale)
    words, scales = slab_layout.pack(tensors.packed, tensors.block_scale)
    return KernelWeight(QERL, words.to(device), scales.to(device), *matrix.shape, float(scale))


def uneven(rows, columns):
    """Blocks from those that saturate to those whose scale is subnormal or zero, with zeros of both signs."""
    matrix = torch.randn(rows, columns) * 2.0 ** torch.randint(-30, 3, (rows, columns // 16)).repeat_interleave(16, 1)
    matrix[0, :16], matrix[1, ::3] = 0.0, -0.0
    return matrix


WEIGHTS = {
    "normal": lambda *size: torch.randn(size) * 0.02,
    "uneven": uneven,
    "zeros": lambda *size: torch.zeros(size),
}


def same_bits(one, other):
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("kind", ["normal", "uneven"])
def test_the_twin_rounds_the_dense_weight(kind):
    torch.manual_seed(0)
    weight = weight_of(WEIGHTS[kind](272, 96))
    found, right = decode.reference_turned(weight, 16, 200), quantize_tensor(reference_decoded(weight), turned=True)
    assert found.scale == right.scale * weight.alpha
    assert weight.alpha != 1.0
    assert same_bits(found.codes, right.codes[:, 16:216])


def test_nothing_saturates_where_no_block_has_the_largest_code():
    """Then the scale may be twice as large as that of the dense weight."""
    codes = torch.full((16, 8), 0x44, dtype=torch.uint8)  # 2.0
    words, scales = slab_layout.pack(codes, torch.full((16, 1), 80.0).to(torch.float8_e4m3fn))
    found = decode.reference_turned(KernelWeight(QERL, words, scales, 16, 16, 1.0), 0, 16)
    assert found.scale == 2.0
    assert (found.codes.float() * found.scale == 160.0).all()


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", [(256, 64), (16, 16), (272, 880), (24, 48), (640, 512)], ids=str)
def test_the_kernel_gives_the_twin_s_bits(shape, kind):
    from qerl.formats.nvfp4.kernels import turn

    torch.manual_seed(1)
    matrix = WEIGHTS[kind](*shape)
    weight, on_card = weight_of(matrix), weight_of(matrix, DEVICE)
    for row_start, rows in {(0, shape[0]), (shape[0] // 2 // 8 * 8, shape[0] // 2 // 8 * 8), (8, 8)}:
        codes, scale = turn(on_card, row_start, rows)
        right = decode.reference_turned(weight, row_start, rows)
        assert float(scale) == float(right.scale)
        assert codes.shape == (shape[1], rows)
        assert same_bits(codes, right.codes)
