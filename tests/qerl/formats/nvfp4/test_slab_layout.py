"""Our own layout: each element is where the formulas say, comes back, and is read by the kernels' bit operations."""

import numpy as np
import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.formats.nvfp4 import kernel_layout, reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.slab_layout import BITS

SIZES = [(256, 64), (1, 16), (24, 880), (300, 48), (515, 144)]


def random_tensors(rows, columns, seed=0):
    """Tensors as in a checkpoint: random codes and positive block scales, some subnormal, an eighth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    scales[torch.rand(scales.shape, generator=generator) < 0.125] = 0
    return packed, scales.view(torch.float8_e4m3fn)


def test_each_code_and_scale_is_where_the_formulas_say():
    packed, scales = random_tensors(300, 176)
    words, laid = slab_layout.pack(packed, scales)
    codes = reference.unpack_codes(packed)
    assert (words.shape, laid.shape) == ((2, 3, 2048), (2, 3, 1024))
    for n, k in [(0, 0), (7, 15), (8, 9), (255, 63), (256, 64), (299, 175), (131, 101), (77, 46)]:
        rows_block, slab, half, lane_hi = n // 256, n % 256 // 16, n % 16 // 8, n % 8
        unit, block, upper, lane_lo, odd = k // 64, k % 64 // 16, k % 16 // 8, k % 8 // 2, k % 2
        word = int(words[rows_block, unit, 128 * slab + 4 * (4 * lane_hi + lane_lo) + block])
        code = sum((word >> bit & 1) << place for place, bit in enumerate(BITS[odd][2 * upper + half]))
        scale = float(scales[n, k // 16])
        assert code == int(codes[n, k]) & (15 if scale else 8)
        stored = int(laid[rows_block, unit, 64 * slab + 8 * lane_hi + 4 * (block // 2) + 2 * half + block % 2])
        assert (2.0 ** (stored // 8 - 10) * (1 + stored % 8 / 8) if stored else 0.0) == scale


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_codes_and_scales_come_back(rows, columns):
    packed, scales = random_tensors(rows, columns)
    words, laid = slab_layout.pack(packed, scales)
    kept = torch.where(scales.view(torch.uint8) == 0, 8, 15).to(torch.uint8).repeat_interleave(16, 1)
    assert torch.equal(slab_layout.codes(words, rows, columns), reference.unpack_codes(packed) & kept)
    assert torch.equal(slab_layout.block_scales(laid, rows, columns), scales.float())


def test_every_positive_e4m3_value_has_its_own_byte():
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)[:, :112]
    rest = torch.arange(111, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales[1, : len(rest)] = rest
    packed = torch.zeros(256, 112 * 8, dtype=torch.uint8)
    _, laid = slab_layout.pack(packed, scales)
    assert torch.equal(slab_layout.block_scales(laid, 256, 112 * 16), scales.float())
    assert len(laid.unique()) == 127
    assert laid.max() == 150  # this is 448; there is room for up to 31 * 8 + 7


def test_the_padding_consists_of_zeros():
    packed, scales = random_tensors(24, 80)
    words, laid = slab_layout.pack(packed | 0x11, scales)
    assert not slab_layout.codes(words, 256, 128)[24:].any()
    assert not slab_layout.codes(words, 256, 128)[:, 80:].any()
    assert not slab_layout.block_scales(laid, 256, 128)[:, 5:].any()


def test_the_size_of_the_pieces_changes_nothing(monkeypatch):
    packed, scales = random_tensors(1100, 96)
    before = packed.clone()
    whole = slab_layout.pack(packed, scales)
    monkeypatch.setattr(slab_layout, "PIECE", 2 * 256 * 96)
    pieces = slab_layout.pack(packed, scales)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))
    assert torch.equal(packed, before)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8], ids=["NaN", "-NaN", "-0", "-1"])
def test_scales_without_a_place_are_refused_by_name(byte):
    packed, scales = random_tensors(16, 64)
    scales.view(torch.uint8)[3, 2] = byte
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj: 1 of 64 block scales are negative or NaN"):
        slab_layout.pack(packed, scales, "layers.0.mlp.down_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_dequantizing_equals_the_reference_to_the_bit(rows, columns, dtype):
    packed, scales = random_tensors(rows, columns)
    weight = KernelWeight(QERL, *slab_layout.pack(packed, scales), rows, columns, global_scale=1377.0)
    expected = reference.dequantize(packed, scales, torch.tensor([1377.0]), dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(kernel_layout.dequantize(weight, dtype).view(bits), expected.view(bits))


def bfloat16_pairs(words):
    """The low and the high half of each uint32 as bfloat16 values, in float64 (..., 2)."""
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), axis=-1)
    return halves.view(np.float32).astype(np.float64)


def test_the_kernels_bit_operations_give_codes_and_scales():
    """`operands`, `even_scales` and `odd_scales` of cuda/slabs.cuh give code * 2^-126 and scale * 2^107.

    They are tried on random words and on bytes that `pack` writes. The low half belongs to column 2 * lane_lo, or to
    row lane_hi; the high half belongs to the next column, or to the row 8 further.
    """
    u32, bits = np.uint32, 0x81C081C0
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(u32)
    found = (
        words & u32(bits),
        (words << u32(10) | words >> u32(22)) & u32(bits),
        (words << u32(6)) & u32(bits),
        (words << u32(4)) & u32(0x81808180) | (words >> u32(4)) & u32(0x00400040),
    )
    for place, pair in enumerate(found):
        for odd in range(2):
            positions = enumerate(BITS[odd][place])
            code = sum((words >> u32(target) & u32(1)) << u32(bit) for bit, target in positions)
            values = reference.decode_e2m1(torch.from_numpy(code.astype(np.uint8))).double().numpy()
            assert np.array_equal(bfloat16_pairs(pair)[..., odd] * 2.0**126, values)
            assert np.array_equal(np.signbit(bfloat16_pairs(pair)[..., odd]), code >= 8)
    every = np.arange(248, dtype=u32)
    value = 2.0 ** (every.astype(np.float64) // 8 - 10) * (1 + every % 8 / 8)
    mask, top = u32(0x0FF00FF0), u32(0x70007000)
    even = (every | every[::-1] << u32(16) | u32(0x5A00A500)) << u32(4) & mask | top
    odd = (every << u32(8) | every[::-1] << u32(24) | u32(0x005A00A5)) >> u32(4) & mask | top
    for pair in (even, odd):
        assert np.array_equal(bfloat16_pairs(pair), np.stack((value, value[::-1]), -1) * 2.0**107)
