"""Searched block scales and GPTQ, against brute force, the textbook's form in float64, and compressed-tensors."""

from itertools import pairwise

import pytest
import torch

from qerl.formats.nvfp4.reference import (
    E2M1_VALUES,
    ZERO_SCALE,
    decode_e2m1,
    dequantize,
    encode_e2m1,
    faults,
    quantize,
    shared_global_scale,
)
from quantize import rounding
from quantize.rounding import (
    CANDIDATES,
    DAMPING,
    error_shares,
    gptq,
    nearest_e2m1,
    roomy_global_scale,
    round_to,
    searched_scales,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment_of(width, tokens=400, seed=1):
    """The second moment of inputs that are correlated, of unequal sizes, and of which one is always zero."""
    x = normal(tokens, width, seed=seed) @ normal(width, width, seed=seed + 1)
    x = x * torch.logspace(-1, 1, width)[torch.randperm(width, generator=torch.Generator().manual_seed(3))]
    x[:, 7] = 0
    return x.T @ x / tokens


def squared_outputs(wrong, moment):
    return ((wrong.double() @ moment.double()) * wrong).sum()


def output_error(weight, tensor, moment):
    return float(squared_outputs(weight - dequantize(*tensor, torch.float32), moment))


def test_the_nearest_values_are_those_of_the_reference_with_its_ties():
    midpoints = [(a + b) / 2 for a, b in pairwise(E2M1_VALUES)]
    near = [value + shift for value in (*E2M1_VALUES, *midpoints, 7.0, 100.0) for shift in (-1e-3, 0.0, 1e-3)]
    values = torch.tensor([*near, *(-value for value in near)])
    assert torch.equal(nearest_e2m1(values), decode_e2m1(encode_e2m1(values)))


def best_by_brute_force(block, scale, importance):
    """The least error of one block over all candidates, in float64."""
    errors = []
    for candidate in CANDIDATES:
        stored = (block.abs().max() / candidate * scale).clamp(max=448).to(torch.float8_e4m3fn).float()
        step = (stored if stored else torch.tensor(ZERO_SCALE)).double() / scale.double()
        grid = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64) * step
        distances = (block.double()[:, None] - grid).square().min(dim=1).values
        errors.append(float((distances * importance.double()).sum()))
    return min(errors), errors[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_each_block_has_the_best_of_the_candidates(weighted):
    weight, importance = normal(12, 64), torch.logspace(-2, 2, 64) if weighted else torch.ones(64)
    weight[3, :16] *= 1e-4
    scale = roomy_global_scale([weight])
    found = round_to(weight, searched_scales(weight, scale, importance if weighted else None), scale)
    wrong = (dequantize(*found, torch.float32) - weight).double().square() * importance
    better = 0
    for row in range(12):
        for first in range(0, 64, 16):
            part = slice(first, first + 16)
            best, usual = best_by_brute_force(weight[row, part], scale, importance[part])
            assert float(wrong[row, part].sum()) == pytest.approx(best, rel=1e-5, abs=1e-12)
            better += best < usual
    assert better > 24  # of 48 blocks: the search does more than take the usual scale


def test_threads_change_nothing(monkeypatch):
    weight, importance = normal(64, 64), torch.logspace(-2, 2, 64)
    scale = roomy_global_scale([weight])
    whole = searched_scales(weight, scale, importance)
    monkeypatch.setattr(rounding, "CHUNK", 5 * 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(searched_scales(weight, scale, importance).view(torch.uint8), whole.view(torch.uint8))


def test_equal_errors_leave_the_usual_scale_and_zeros_the_scale_of_zero():
    weight = torch.zeros(2, 32)
    weight[0, :16] = torch.tensor([6.0, *[3.0] * 15])
    scale = torch.tensor([64.0])
    found = searched_scales(weight, scale)
    assert found.float().tolist() == [[64.0, ZERO_SCALE], [ZERO_SCALE, ZERO_SCALE]]
    assert torch.equal(dequantize(*round_to(weight, found, scale), torch.float32), weight)


@pytest.mark.parametrize("kind", ["amax", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_global_scale_leaves_room_for_every_candidate(kind, dtype):
    weights = [normal(32, 64, seed=seed).to(dtype) * (seed + 1) for seed in range(3)]
    scale = roomy_global_scale(weights, kind)
    assert torch.equal(scale, shared_global_scale(weights, kind) / 2)
    for weight in weights:
        assert faults(2 * weight, scale)[1] == 0  # a candidate of 3 doubles the usual block scale
    amax = torch.stack([weight.abs().max() for weight in weights]).max().float()
    assert amax / 3 * scale <= 450
    assert amax / 3 * scale > (440 if kind == "amax" else 224)


@pytest.mark.parametrize("amax", [0.0, 1e-38, 3e38])
def test_the_global_scale_of_extreme_weights_is_finite(amax):
    for kind in ("amax", "pow2"):
        scale = roomy_global_scale([torch.full((1, 16), amax)], kind)
        assert 0 < float(scale) < float("inf")


def test_rounding_under_the_usual_scales_gives_the_bits_of_the_reference():
    weight = normal(24, 64)
    usual = quantize(weight)
    for ours, expected in zip(round_to(weight, usual.block_scale, usual.global_scale), usual, strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def textbook(weight, steps, moment):
    """GPTQ as published: the inverse is factored, and each column's error goes to all later ones. In float64."""
    weight, hessian = weight.double().clone(), moment.double().clone()
    dead = hessian.diagonal() == 0
    damping = DAMPING * hessian.diagonal().mean()
    hessian.diagonal()[dead] = 1
    hessian += damping * torch.eye(len(hessian), dtype=torch.float64)
    order = moment.diagonal().argsort(descending=True, stable=True)
    weight, hessian, steps = weight[:, order], hessian[order][:, order], steps.double()[:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    rounded = torch.empty_like(weight)
    for j in range(weight.shape[1]):
        rounded[:, j] = nearest_e2m1((weight[:, j] / steps[:, j]).float()) * steps[:, j]
        error = (weight[:, j] - rounded[:, j]) / upper[j, j]
        weight[:, j:] -= error[:, None] * upper[j, j:]
    return rounded[:, order.argsort()].float()


@pytest.mark.parametrize("width", [64, 320])  # less and more than the columns of a product
def test_gptq_rounds_as_the_textbook_does(width):
    weight, moment = normal(40, width), moment_of(width)
    scale = roomy_global_scale([weight])
    found = gptq(weight, searched_scales(weight, scale, moment.diagonal()), scale, moment)
    steps = (found.block_scale.float() / scale).repeat_interleave(16, dim=1)
    ours, theirs = dequantize(*found, torch.float32), textbook(weight, steps, moment)
    # In float32 a value on the edge of rounding may fall the other way, and all later columns of that row follow it.
    assert float((ours == theirs).all(dim=1).float().mean()) > 0.85
    wrong = (weight - theirs).double()
    assert output_error(weight, found, moment) == pytest.approx(
        float(((wrong @ moment.double()) * wrong).sum()), rel=0.02
    )


@pytest.mark.parametrize("moment", [torch.zeros(64, 64), torch.ones(64, 64)])
def test_a_singular_moment_is_no_special_case(moment):
    weight = normal(16, 64)
    scale = roomy_global_scale([weight])
    found = gptq(weight, searched_scales(weight, scale, moment.diagonal()), scale, moment)
    assert output_error(weight, found, moment) <= output_error(weight, quantize(weight), moment)
    assert float((dequantize(*found, torch.float32) - weight).norm() / weight.norm()) < 0.4


def test_an_input_that_is_always_zero_neither_gives_nor_takes_an_error():
    moment = moment_of(64)
    order = moment.diagonal().argsort(descending=True, stable=True)
    shares = error_shares(moment, order)
    at = int((order == 7).nonzero())
    assert shares[at].abs().max() == 0
    assert shares[:, at].abs().max() == 0
    assert shares.triu(1).equal(shares)
    assert shares.abs().max() > 0.1


def test_what_is_no_moment_is_refused():
    with pytest.raises(torch.linalg.LinAlgError):
        error_shares(-moment_of(32), torch.arange(32))
