"""The layouts of the kernels against their packers, transcribed loop by loop from the CUDA sources named there."""

import pytest
import torch

from qerl.formats.nvfp4 import kernel_layout, reference
from qerl.formats.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, KernelWeight, codes, dequantize
from tests.helpers.marlin import marlin_scales, marlin_words

ROWS, COLUMNS = 128, 96


def humming_pack(code: torch.Tensor, wgmma: bool) -> torch.Tensor:
    """humming-kernels 0.1.10, `weight_repack_nk` and `humming_pack_weight` in kernel/process.cuh: 16-bit A, 4-bit B."""
    rows, columns = code.shape
    out = torch.zeros(columns // 16, rows * 2, dtype=torch.int64)
    for tile in range(rows // 64):
        for thread in range(32):
            for block in range(columns // 16):
                tmp = torch.zeros(4, 2, 2, 2, dtype=torch.int64)  # INDEX3 .. INDEX6 of the source
                for i in range(8):
                    for j in range(2):
                        for k in range(2):
                            column = block * 16 + j * 8 + thread % 4 * 2 + k
                            value = int(code[tile * 64 + i * 8 + thread // 4, column])
                            where = (i // 2, j, i % 2, k) if wgmma else (i // 2, i % 2, j, k)
                            tmp[where] = value
                for word, values in enumerate(tmp.reshape(4, 8).tolist()):
                    packed = sum(values[k % 4 * 2 + k // 4] << (4 * k) for k in range(8))  # interleave mode 3
                    out[block, 128 * tile + thread * 4 + word] = packed
    return out.to(torch.int32)


def humming_scales(scale: torch.Tensor) -> torch.Tensor:
    """`prepare_humming_weight_scale`, utils/weight.py, group scales."""
    perm = [x + i for i in range(8) for x in (0, 8, 16, 24, 32, 40, 48, 56)]
    turned = scale.view(torch.uint8).t().contiguous()
    return turned.view(-1, 64)[:, perm].reshape(turned.shape)


@pytest.fixture(scope="module")
def packed():
    """A tensor with every code, scales from the smallest normal e4m3 to 448, and no power of two as global scale."""
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
    scale = torch.randint(8, 127, (ROWS, COLUMNS // 16), generator=generator).to(torch.uint8)
    scale[0, 0], scale[5, 2] = 126, 8
    return code, scale.view(torch.float8_e4m3fn), torch.tensor([1234.5])


def kernel_weight(packed, layout, rows=ROWS, factor=1.0):
    code, scale, global_scale = packed
    if layout is MARLIN:
        words, scales = marlin_words(code), marlin_scales(scale, factor)
    else:
        words, scales = humming_pack(code, layout.transposed), humming_scales(scale)
    return KernelWeight(layout, words, scales, rows, COLUMNS, float(global_scale), factor)


@pytest.mark.parametrize("layout", [HUMMING_WGMMA, HUMMING_MMA, MARLIN], ids=["wgmma", "mma", "marlin"])
def test_codes_scales_and_weights_come_back_bit_exactly(packed, layout):
    code, scale, global_scale = packed
    weight = kernel_weight(packed, layout)
    assert torch.equal(codes(weight), code)
    assert torch.equal(kernel_layout.block_scales(weight), scale.float())
    expected = reference.dequantize(reference.pack_codes(code), scale, global_scale, torch.bfloat16)
    assert torch.equal(dequantize(weight, torch.bfloat16).view(torch.int16), expected.view(torch.int16))


def test_rows_that_the_kernel_added_as_padding_are_left_out(packed):
    weight = kernel_weight(packed, HUMMING_WGMMA, rows=100)
    assert torch.equal(codes(weight), packed[0][:100])
    assert weight.scales.shape[1] == ROWS


def test_the_power_of_two_that_marlin_moves_is_moved_back(packed):
    code, scale, global_scale = packed
    small = (scale.float() / 16).to(torch.float8_e4m3fn)  # the largest is 28, so Marlin multiplies all by 16
    keep = small.float() * 16 == scale.float()
    weight = kernel_weight((code, small, global_scale), MARLIN, factor=16.0)
    expected = reference.dequantize(reference.pack_codes(code), small, global_scale, torch.float32)
    exact = keep.repeat_interleave(16, dim=1)
    assert torch.equal(dequantize(weight, torch.float32)[exact], expected[exact])
    assert weight.alpha == pytest.approx(1 / (1234.5 * 16))


@pytest.mark.parametrize(("largest", "factor"), [(126, 1.0), (94, 16.0)])  # as e4m3 bytes: 448 and 28
def test_scales_that_marlin_drops_are_counted(largest, factor):
    bytes_ = torch.arange(largest + 1, dtype=torch.uint8).repeat(64)[: 64 * 64].reshape(64, 64)
    bytes_[0, 0] = largest
    scale = bytes_.view(torch.float8_e4m3fn)
    dropped = ((marlin_scales(scale, factor) == 0).sum() - (bytes_ == 0).sum()).item()
    assert kernel_layout.scales_marlin_drops(scale) == dropped
    assert (dropped > 0) == (factor == 1.0)  # 28 leaves room for a factor that makes every subnormal normal
