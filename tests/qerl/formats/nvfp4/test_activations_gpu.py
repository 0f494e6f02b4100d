"""The kernel that rounds activations against its twin, bit by bit, and inside a captured CUDA graph.

Last run on an H200 on 2026-11-22.
"""

import pytest
import torch

from qerl.formats.nvfp4.activations import Activations, round_by_twin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_seed")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SCALES = pytest.mark.parametrize("scale", [None, 1.0, 3.7, 2688 / 9], ids=["dynamic", "1", "3.7", "298.7"])


def awkward(rows, columns):
    """Outliers, ties, zeros, tiny and huge blocks, inf and NaN."""
    x = torch.randn(rows, columns)
    x[0] *= 2.0 ** torch.randint(-30, 12, (columns // 16,)).repeat_interleave(16)
    x[1 % rows] = torch.randint(-24, 25, (columns,)) / 4
    x[2 % rows, :16], x[3 % rows] = -0.0, torch.randn(columns) * 1e-25
    x[4 % rows, 0], x[5 % rows, columns - 1] = float("inf"), float("nan")
    return x


def same_bits(one, other):
    """NaN counts as equal to NaN."""
    assert torch.equal(one.isnan(), other.isnan())
    one, other = (x.nan_to_num(nan=0.0).view(torch.uint8) for x in (one, other))
    assert torch.equal(one, other)


@DTYPES
@SCALES
@pytest.mark.parametrize("size", [(1, 16), (1, 3584), (6, 18944), (7, 2064), (300, 3584), (2, 3, 4096)], ids=str)
def test_the_kernel_gives_the_bits_of_its_twin(size, scale, dtype):
    x = awkward(torch.Size(size[:-1]).numel(), size[-1]).view(size).to(dtype)
    same_bits(Activations(scale)(x.cuda()).cpu(), round_by_twin(x, scale))


@SCALES
def test_a_row_is_rounded_alike_in_any_batch(scale):
    x = torch.randn(600, 3584, device="cuda").bfloat16()
    whole = Activations(scale)(x)
    for rows in (slice(0, 1), slice(5, 13), slice(100, 400), slice(0, 0)):
        assert torch.equal(Activations(scale)(x[rows]), whole[rows])
    assert torch.equal(Activations(scale)(x[:, :32]), Activations(scale)(x[:, :32].contiguous()))


@SCALES
def test_a_captured_graph_rounds_what_its_input_holds_when_it_is_replayed(scale):
    x, rounds = torch.randn(4, 3584, device="cuda").bfloat16(), Activations(scale)
    rounds(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rounds(x)
    x.normal_(std=3.0)
    graph.replay()
    assert torch.equal(out.cpu(), round_by_twin(x.cpu(), scale))
