"""Copies of rows and the sums of their gradients: values by hand, autograd, and the kernel against its twin.

The tests of the kernel last ran on an H200 on 2026-11-22. Without a card but with triton installed, run them by
`TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_copies.py`.
"""

import os

import pytest
import torch

from qerl.model.packing import Copies, copies_of, gather_rows, sum_copies

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def test_copies_list_their_rows_and_rows_their_copies():
    copies = copies_of(torch.tensor([3, 0, 3, 1, 3]), 5)
    assert copies.rows.tolist() == [3, 0, 3, 1, 3]
    assert copies.order.tolist() == [1, 3, 0, 2, 4]
    assert copies.starts.tolist() == [0, 1, 2, 2, 5, 5]
    assert [part.tolist() for part in copies_of(torch.tensor([], dtype=torch.long), 2)] == [[], [], [0, 0, 0]]


def test_gradients_equal_those_of_plain_indexing():
    torch.manual_seed(0)
    rows, index = torch.randn(6, 2, 4, requires_grad=True), torch.randint(6, (20,))
    upstream = torch.randn(20, 2, 4)
    results = []
    for taken in (gather_rows(rows, copies_of(index, 6)), rows[index]):
        results.append((taken, *torch.autograd.grad((taken * upstream).sum(), rows)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_sums_are_rounded_once():
    """The sum is 256 + 63 x 1: in bfloat16, adding ones to 256 would change nothing."""
    grad = torch.ones(64, 1, dtype=torch.bfloat16)
    grad[0] = 256
    assert sum_copies(grad, copies_of(torch.zeros(64, dtype=torch.long), 1)).item() == 320  # 319 is halfway


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 128), (3584,), (3, 7)], ids=str)
def test_the_kernel_agrees_with_its_twin_and_repeats_to_the_bit(shape, dtype):
    from qerl.model import kernels

    generator = torch.Generator().manual_seed(3)
    index = torch.cat([torch.arange(2, 60), torch.randint(2, 20, (120,), generator=generator)])  # row 0 has no copy
    grad = torch.randn(len(index), *shape, generator=generator).to(dtype)
    expected = sum_copies(grad, copies_of(index, 60))  # on the CPU they are added one after another, as in the kernel
    copies = Copies(*(part.to(DEVICE) for part in copies_of(index, 60)))
    grad = grad.to(DEVICE)
    total = kernels.sum_copies(grad, copies)
    assert total.dtype == dtype
    assert torch.equal(total.cpu(), expected)
    assert all(torch.equal(total, kernels.sum_copies(grad, copies)) for _ in range(3))
    assert (total[:2] == 0).all()
