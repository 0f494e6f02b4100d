"""The factors of the start are the best of their rank, against the singular value decomposition in float64."""

import math

import pytest
import torch

from quantize.rounding import Factors, balanced, best_factors, rate_ratio

pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment_of(width, tokens=500):
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
    error, moment = normal(*shape), moment_of(shape[1])
    found = best_factors(error, moment, rank)
    assert (found.a.shape, found.b.shape) == ((rank, shape[1]), (shape[0], rank))
    assert left(error, found, moment) == pytest.approx(least(error, moment, rank), rel=2e-3)


def test_every_prefix_is_the_best_of_its_rank():
    error, moment = normal(96, 64), moment_of(64)
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
    error, moment = normal(96, 64), moment_of(64)
    one, two = best_factors(error, moment, 8), best_factors(error, moment, 8)
    assert torch.allclose(one.a.norm(dim=1), one.b.norm(dim=0), rtol=1e-5)
    assert torch.equal(one.a, two.a)
    assert torch.equal(one.b, two.b)


@pytest.mark.parametrize("error", [torch.zeros(32, 48), normal(32, 1) @ normal(1, 48)])
def test_an_error_of_smaller_rank_gives_finite_factors(error):
    moment = moment_of(48)
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
    factors, moment = Factors(normal(rank, width), normal(out, rank, seed=1)), moment_of(width)
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
