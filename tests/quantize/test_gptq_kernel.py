"""The Triton kernel of GPTQ's columns gives what its twin in torch gives.

Without a card but with triton installed, it runs by
`TRITON_INTERPRET=1 pytest -m gpu tests/quantize/test_gptq_kernel.py`.
"""

import os
from itertools import pairwise

import pytest
import torch

from qerl.formats.nvfp4.reference import E2M1_VALUES, dequantize
from quantize import rounding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.gpu(instead=INTERPRETED)


def block(count, rows, seed=0):
    """What `round_columns_` takes, with codes and errors to fill."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(count, rows, generator=generator)
    targets = columns + 0.1 * torch.randn(count, rows, generator=generator)
    steps = torch.rand(count, rows, generator=generator) + 0.1
    wide = torch.randn(count, count + 16, generator=generator)  # so that rows are not next to one another
    shares = (0.1 * wide)[:, :count].triu(1)
    wide[:, :count] = shares
    return [each.to(DEVICE) for each in (targets, columns, steps, wide)]


@pytest.mark.parametrize(("count", "rows"), [(128, 96), (64, 33), (16, 5), (48, 64)])
def test_it_rounds_as_the_twin_does(count, rows):
    from quantize.gptq_kernel import round_columns_

    targets, columns, steps, wide = block(count, rows)
    shares = wide[:, :count]
    expected, found = ([torch.full_like(columns, 9.0) for _ in range(2)] for _ in range(2))
    rounding.round_columns_(targets.clone(), columns, steps, shares, *expected)
    round_columns_(targets, columns, steps, shares, *found)
    # A sum in another order may fall on the other side of a midpoint, which the later columns of that row then follow.
    same = (found[0] == expected[0]).all(dim=0)
    assert same.float().mean() > 0.9
    assert torch.allclose(found[1][:, same], expected[1][:, same], atol=1e-4)
    assert torch.allclose(found[1], columns - found[0] * steps, atol=1e-5)


def test_ties_go_to_the_even_code_and_large_values_to_six():
    from quantize.gptq_kernel import round_columns_

    ties = [(a + b) / 2 for a, b in pairwise(E2M1_VALUES)]
    values = torch.tensor([*ties, 5.5, 7.0, 8.5, 1e30, *E2M1_VALUES], device=DEVICE)
    targets = torch.stack([values, -values])
    codes, errors = torch.empty_like(targets), torch.empty_like(targets)
    round_columns_(targets, targets, torch.ones_like(targets), torch.zeros(2, 2, device=DEVICE), codes, errors)
    assert torch.equal(codes, rounding.nearest_e2m1(targets))


def test_gptq_on_a_device_leaves_the_error_that_it_leaves_on_a_cpu(monkeypatch):
    from quantize.gptq_kernel import round_columns_

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 320, generator=generator)
    x = torch.randn(2000, 320, generator=generator) @ torch.randn(320, 320, generator=generator)
    moment = x.T @ x / 2000
    scale = rounding.roomy_global_scale([weight])
    scales = rounding.searched_scales(weight, scale, moment.diagonal())
    errors = []
    for device, kernel in (("cpu", rounding.round_columns_), (DEVICE, round_columns_)):
        monkeypatch.setattr(rounding, "columns_rounder", lambda device, kernel=kernel: kernel)
        given = [each.to(device) for each in (weight, scales, scale, moment)]
        wrong = (dequantize(*rounding.gptq(*given), torch.float32).cpu() - weight).double()
        errors.append(float(((wrong @ moment.double()) * wrong).sum()))
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
