"""The FP8 recipes of training: what they round, against sums in float64 of the rounded matrices."""

import pytest
import torch

from qerl.formats.fp8 import reference
from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import E5M2, Blockwise, Tensorwise, quantize_tensor, recipe_of

T, IN, OUT = 37, 300, 200


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(x, dtype=E4M3):
    """x under the scale 2^ceil(log2(amax / max)), in float64."""
    scale = 2.0 ** torch.log2(x.double().abs().amax() / torch.finfo(dtype).max).ceil()
    return (x.double() / scale).to(dtype).double() * scale


def grouped(x):
    return reference.dequantize_input(*reference.quantize_input(x)).double()


def blocks(weight):
    return reference.dequantize(*reference.quantize(weight), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_a_matrix_has_one_scale_and_is_rounded_once(kind, dtype):
    x = 3e-4 * normal(T, IN, dtype=dtype)
    codes, scale = quantize_tensor(x, kind)
    assert codes.dtype == kind
    assert torch.equal(codes.double() * scale.double(), decoded(x, kind))
    assert codes.float().abs().max() > torch.finfo(kind).max / 2.3


def test_a_matrix_of_zeros_stays_and_one_with_infinities_becomes_nan():
    codes, scale = quantize_tensor(torch.zeros(3, 4))
    assert scale > 0
    assert not codes.float().any()
    for bad in (torch.inf, torch.nan):
        x = normal(4, 16)
        x[1, 2] = bad
        recipe = Tensorwise()
        assert recipe.output(x, recipe.weight(normal(16, 16))).isnan().all()


@pytest.mark.parametrize("name", ["e4m3", "hybrid"])
def test_tensorwise_products_are_those_of_the_rounded_matrices(name):
    kind = E4M3 if name == "e4m3" else E5M2
    recipe, x, weight, grad = Tensorwise(kind), normal(T, IN), normal(OUT, IN, seed=1), normal(T, OUT, seed=2)
    held = recipe.weight(weight)
    for found, right in (
        (recipe.output(x, held), decoded(x) @ decoded(weight).t()),
        (recipe.to_input(grad, recipe.turned(weight)), decoded(grad, kind) @ decoded(weight)),
        (recipe.to_weight(grad, x), decoded(grad, kind).t() @ decoded(x)),
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def test_blockwise_products_are_those_of_groups_and_blocks():
    recipe, x, weight, grad = recipe_of("blockwise"), normal(T, IN), normal(OUT, IN, seed=1), normal(T, OUT, seed=2)
    held = recipe.weight(weight)
    torch.testing.assert_close(recipe.output(x, held).double(), grouped(x) @ blocks(weight).t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        recipe.to_input(grad, recipe.turned(held)).double(), grouped(grad) @ blocks(weight), rtol=1e-5, atol=1e-4
    )
    assert recipe.weight(held) is held


def test_an_fp8_weight_is_rounded_again_by_a_scale_of_the_whole():
    weight = normal(256, IN, seed=1) * torch.tensor([1.0, 64.0]).repeat_interleave(128)[:, None]
    in_blocks = reference.quantize(weight)
    codes, scale = Tensorwise().weight(in_blocks)
    assert torch.equal(codes.double() * scale.double(), decoded(reference.dequantize(*in_blocks, torch.float32)))


def test_a_recipe_has_a_name_and_its_products():
    assert recipe_of("tensorwise") == Tensorwise(E5M2)
    assert recipe_of("blockwise") == Blockwise()
    assert recipe_of("tensorwise", "gradients") == Tensorwise(rounds_output=False)
