"""Searched scales, GPTQ and a start's factors, against brute force, the textbook in float64, and compressed-tensors."""

import math
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
    Factors,
    balanced,
    best_factors,
    error_shares,
    gptq,
    nearest_e2m1,
    rate_ratio,
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


def graded_moment(width, tokens=500):
    x = normal(tokens, width, seed=1) @ normal(width, width, seed=2) * torch.logspace(-1, 1, width)
    return x.T @ x / tokens


def left(error, factors, moment):
    """tr((E - BA) R (E - BA)') in float64."""
    rest = error.double() - factors.b.double() @ factors.a.double()
    return float(((rest @ moment.double()) * rest).sum())


def least(error, moment, rank):
    """The same at its minimum, by a symmetric root of R."""
    values, vectors = torch.linalg.eigh(moment.double())
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return float(torch.linalg.svdvals(error.double() @ root)[rank:].square().sum())


@pytest.mark.parametrize("shape", [(96, 64), (48, 128), (20, 64)])
@pytest.mark.parametrize("rank", [1, 8, 16])
def test_no_factors_of_the_rank_leave_less(shape, rank):
    error, moment = normal(*shape), graded_moment(shape[1])
    found = best_factors(error, moment, rank)
    assert (found.a.shape, found.b.shape) == ((rank, shape[1]), (shape[0], rank))
    assert left(error, found, moment) == pytest.approx(least(error, moment, rank), rel=2e-3)


def test_every_prefix_is_the_best_of_its_rank():
    error, moment = normal(96, 64), graded_moment(64)
    found = best_factors(error, moment, 24)
    for rank in (1, 3, 8, 16, 23):
        assert left(error, found.prefix(rank), moment) == pytest.approx(least(error, moment, rank), rel=5e-3)


def test_a_moment_of_fewer_tokens_than_inputs_needs_nothing_else():
    error = normal(64, 96)
    x = normal(10, 96, seed=4)
    moment = x.T @ x / 10
    found = best_factors(error, moment, 10)
    assert left(error, found, moment) < 1e-6 * left(error, Factors(found.a * 0, found.b), moment)
    assert found.a.isfinite().all()


def test_each_pair_is_balanced_and_the_same_each_time():
    error, moment = normal(96, 64), graded_moment(64)
    one, two = best_factors(error, moment, 8), best_factors(error, moment, 8)
    assert torch.allclose(one.a.norm(dim=1), one.b.norm(dim=0), rtol=1e-5)
    assert torch.equal(one.a, two.a)
    assert torch.equal(one.b, two.b)


@pytest.mark.parametrize("error", [torch.zeros(32, 48), normal(32, 1) @ normal(1, 48)])
def test_an_error_of_smaller_rank_gives_finite_factors(error):
    moment = graded_moment(48)
    found = best_factors(error, moment, 8)
    assert found.a.isfinite().all()
    assert found.b.isfinite().all()
    assert left(error, found, moment) <= 1e-6 * left(error, Factors(found.a * 0, found.b), moment)


def test_balancing_leaves_the_product_and_zeros():
    factors = Factors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[20.0, 1.0], [0.0, 1.0]]))
    found = balanced(factors)
    assert torch.allclose(found.b @ found.a, factors.b @ factors.a)
    assert found.a.norm(dim=1)[0] == pytest.approx(10.0)
    assert found.a[1].tolist() == [0.0, 0.0]


def test_the_rate_ratio_is_that_of_steps_with_random_signs():
    """By sampling: outputs change by B dA x + dB A x, from a fresh pair by dB A x alone."""
    rank, out, width = 4, 24, 32
    factors, moment = Factors(normal(rank, width), normal(out, rank, seed=1)), graded_moment(width)
    root = torch.linalg.cholesky(moment + 1e-6 * torch.eye(width))

    def signs(*shape, seed):
        return normal(*shape, seed=seed).sign()

    def moved(a, b, seed):
        change = b @ signs(rank, width, seed=seed) + signs(out, rank, seed=seed + 1) @ a
        return float((change @ root).square().sum())

    bound = 1 / math.sqrt(width)
    fresh = [(torch.rand(rank, width, generator=torch.Generator().manual_seed(n)) * 2 - 1) * bound for n in range(400)]
    ours = sum(moved(*factors, 2 * n + 1000) for n in range(400))
    theirs = sum(moved(a, torch.zeros(out, rank), 2 * n + 5000) for n, a in enumerate(fresh))
    assert rate_ratio(factors, moment) == pytest.approx(math.sqrt(ours / theirs), rel=0.05)


def test_there_is_no_ratio_without_inputs():
    assert rate_ratio(Factors(normal(2, 16), normal(8, 2)), torch.zeros(16, 16)) is None
