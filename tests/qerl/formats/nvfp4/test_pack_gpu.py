"""The packing kernels against the reference, byte for byte, on fresh random weights and on awkward ones.

All but those that say so last passed on an H200 on 2026-11-22.
"""

import pytest
import torch

from qerl.engine.update import pack_weights_
from qerl.formats.nvfp4 import gemm, reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import MARLIN, QERL, KernelLinear, KernelWeight, kernel_packs, pack_by_kernel_
from qerl.model import master
from qerl.model.master import LowRankSum
from tests.helpers.gemm_cases import assert_rounded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_seed")]
SIZES = [(256, 64), (16, 16), (48, 176), (272, 880), (24, 48), (1152, 3584)]  # 24 rows end inside a slab
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def normal(rows, columns):
    return torch.randn(rows, columns) * 0.02


def with_zeros(rows, columns):
    """Blocks and rows of 0.0 and of -0.0, and a row whose block scales round to zero."""
    weight = normal(rows, columns)
    weight[:, :16], weight[1], weight[2], weight[3, ::2] = 0.0, 0.0, -0.0, -0.0
    weight[4] *= 1e-9
    return weight


def on_ties(rows, columns):
    """Quarters of a power of two: with such a scale many numbers lie halfway between two codes."""
    return torch.randint(-24, 25, (rows, columns)).float() / 4 * 2.0 ** torch.randint(-8, -3, (rows, 1))


def uneven(rows, columns):
    """Blocks of very different size, from those that saturate to those whose scale is subnormal or rounds to zero."""
    return torch.randn(rows, columns) * 2.0 ** torch.randint(-30, 3, (rows, columns // 16)).repeat_interleave(16, 1)


WEIGHTS = {
    "normal": normal,
    "student": lambda *size: torch.distributions.StudentT(3.0).sample(size) * 0.02,
    "zeros": with_zeros,
    "ties": on_ties,
    "uneven": uneven,
    "tiny": lambda *size: torch.randn(size) * 1e-36,
    "subnormal": lambda *size: torch.randn(size) * 1e-41,
    "huge": lambda *size: torch.randn(size) * 1e30,
    "nearly zero": lambda *size: -(torch.rand(size) ** 20) * 0.02,
}


def scales_of(weight):
    """Global scales: as training has it, as llm-compressor writes it, and one under which block scales saturate."""
    training, usual = reference.shared_global_scale([weight], "pow2", 2), reference.shared_global_scale([weight])
    return [scale for scale in (training, usual, 8 * usual) if scale.isfinite()]


def empty_weight(rows, columns, scale, layout=QERL):
    """A weight whose tensors hold other bits, on the card."""
    words, scales = slab_layout.pack(
        torch.full((rows, columns // 2), 0x5B, dtype=torch.uint8),
        torch.full((rows, columns // 16), 2.0).to(torch.float8_e4m3fn),
    )
    return KernelWeight(layout, words.cuda(), scales.cuda(), rows, columns, float(scale))


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@DTYPES
def test_the_bytes_and_the_counts_are_the_references(make, size, dtype):
    matrix = make(*size).to(dtype)
    for scale in scales_of(matrix):
        weight = empty_weight(*size, scale)
        assert kernel_packs(weight, 0, matrix.cuda())
        counts = pack_by_kernel_(weight, 0, matrix.cuda())
        expected = reference.quantize(matrix, scale)
        words, scales = slab_layout.pack(expected.packed, expected.block_scale)
        assert torch.equal(weight.words.cpu(), words)
        assert torch.equal(weight.scales.cpu(), scales)
        assert torch.equal(counts.cpu(), reference.faults(matrix, scale))


@pytest.mark.parametrize(("start", "rows"), [(0, 16), (16, 272), (256, 256), (528, 16), (544, 40)])
def test_other_rows_keep_their_bits(start, rows):
    weight = empty_weight(584, 176, 512.0)
    words, scales = weight.words.clone(), weight.scales.clone()
    matrix = normal(rows, 176)
    assert kernel_packs(weight, start, matrix.cuda())
    pack_by_kernel_(weight, start, matrix.cuda())
    expected = reference.quantize(matrix, torch.tensor([512.0]))
    words, scales = words.cpu(), scales.cpu()
    slab_layout.pack_(words, scales, start, expected.packed, expected.block_scale)
    assert torch.equal(weight.words.cpu(), words)
    assert torch.equal(weight.scales.cpu(), scales)


@pytest.mark.parametrize("place", [torch.Tensor.cuda, torch.Tensor.pin_memory], ids=["card", "host"])
def test_weights_with_an_adapter_are_packed_in_pieces_to_the_bytes_of_a_cpu(place, monkeypatch):
    """It has not run on a card yet."""
    start, a, b = normal(656, 176).bfloat16(), torch.randn(32, 176), 1e-3 * torch.randn(656, 32)
    dense = LowRankSum(start, a, b, 2.0).dense(torch.device("cpu"))
    expected = reference.quantize(dense, torch.tensor([512.0]))
    words, scales = slab_layout.pack(expected.packed, expected.block_scale)
    monkeypatch.setattr(master, "PIECE", 256 * 176)
    weight = empty_weight(656, 176, 512.0)
    places = weight.words.data_ptr(), weight.scales.data_ptr()
    sums = {"one": LowRankSum(place(start), a.cuda(), b.cuda(), 2.0)}
    pack_weights_(sums, {"one": KernelLinear(weight, 0, 656, None)})
    assert torch.equal(weight.words.cpu(), words)
    assert torch.equal(weight.scales.cpu(), scales)
    assert places == (weight.words.data_ptr(), weight.scales.data_ptr())


@pytest.mark.parametrize(
    ("start", "matrix"),
    [
        (8, torch.zeros(16, 64)),
        (0, torch.zeros(24, 64)),
        (0, torch.zeros(32, 64, dtype=torch.float16)),
        (0, torch.zeros(64, 32).t()),
        (0, torch.zeros(1 + 32 * 64)[1:].view(32, 64)),
    ],
    ids=["first row", "last row", "dtype", "strides", "address"],
)
def test_what_the_kernel_does_not_take_is_packed_by_the_twin(start, matrix):
    weight = empty_weight(64, 64, 512.0)
    moved = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype, device="cuda").copy_(matrix)
    if matrix.storage_offset():
        moved = torch.zeros(1 + 32 * 64, device="cuda")[1:].view(32, 64)
    assert not kernel_packs(weight, start, moved)
    assert not kernel_packs(empty_weight(64, 64, 512.0, MARLIN), 0, torch.zeros(64, 64, device="cuda"))
    linear = KernelLinear(weight, start, len(moved), None)
    linear.pack_(moved)
    assert torch.equal(linear.unpack(torch.float32).cpu(), torch.zeros(matrix.shape))


@DTYPES
def test_inf_and_nan_are_counted_by_block(dtype):
    matrix = normal(32, 64).to(dtype)
    matrix[3, 5] = matrix[3, 6] = float("nan")
    matrix[31, 63], matrix[0, 0] = float("inf"), -float("inf")
    matrix[9, 20] = 1e9
    scale = torch.tensor([512.0])
    counts = pack_by_kernel_(empty_weight(32, 64, 512.0), 0, matrix.cuda())
    assert counts.tolist() == reference.faults(matrix, scale).tolist() == [3, 1]


def test_packing_repeats_to_the_bit_and_follows_the_stream():
    """A copy on the same stream, right behind the packing, reads what was packed."""
    weight, first, second = empty_weight(3584, 3584, 512.0), normal(3584, 3584).cuda(), normal(3584, 3584).cuda()
    seen = []
    for matrix in (first, second, first):
        pack_by_kernel_(weight, 0, matrix)
        seen.append(weight.words.clone())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_a_product_after_a_synchronize_multiplies_by_the_new_weight():
    """The product reads its weight before the launch ahead of it has ended."""
    weight, x = empty_weight(3584, 3584, 512.0), torch.randn(8, 3584, device="cuda").bfloat16()
    matrices = [normal(3584, 3584).cuda() for _ in range(2)]
    expected = []
    for turn in range(20):
        pack_by_kernel_(weight, 0, matrices[turn % 2])
        torch.cuda.synchronize()
        out = gemm.product(x, weight)
        if turn < 2:
            assert_rounded(out, gemm.reference_product(x, weight))
            expected.append(out)
        assert torch.equal(out, expected[turn % 2])
