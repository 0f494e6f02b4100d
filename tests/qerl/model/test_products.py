"""Products of linears by an FP8 recipe: forward and gradients, beside adapters and masters, on every kind of weight."""

from functools import partial

import pytest
import torch

from qerl.formats.fp8 import reference, training
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import E5M2, recipe_of
from qerl.formats.nvfp4 import decode, slab_layout
from qerl.formats.nvfp4 import reference as nvfp4
from qerl.formats.nvfp4.kernel_layout import QERL, KernelLinear, KernelWeight
from qerl.model.layers import mlp_forward
from qerl.model.lora import Part, lora_linear
from qerl.model.master import master_of, multiply_by_masters_, serving, set_master_
from qerl.model.products import set_recipe_
from tests.helpers.linear_twins import packed_fp8, packed_nvfp4

KINDS = {"dense": lambda linear: linear, "nvfp4": packed_nvfp4, "fp8": packed_fp8}
RECIPES = ["tensorwise", "blockwise"]
GRADIENTS = recipe_of("tensorwise", products="gradients")


def model_of(kind, rows=(256, 128), rounds_input=True, master=None):
    """Linears of 256 inputs, and with masters, `master` of their dense weights, if it is given."""
    torch.manual_seed(0)
    linears = [KINDS[kind](torch.nn.Linear(256, count, bias=False)) for count in rows]
    model = torch.nn.ModuleList(linears).requires_grad_(False)
    for linear in linears:
        linear.rounds_input = rounds_input
        if master is not None:
            set_master_(linear, master(dense(linear)))
    return model


def dense(linear):
    return torch.as_tensor(linear.weight + 0).detach().clone()


def product_of(model, x):
    return lora_linear(x, [Part(linear, master=master_of(linear)) for linear in model])


def factors(rows):
    torch.manual_seed(1)
    return 0.1 * torch.randn(8, 256), 0.1 * torch.randn(rows, 8)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_added_in_16_bits_to_the_recipe_s_products(kind, name):
    """The recipe's own products are the oracle, which test_training.py holds to float64."""
    model, recipe = model_of(kind), recipe_of(name)
    set_recipe_(model, [*model], recipe)
    pairs = [[each.requires_grad_() for each in factors(linear.out_features)] for linear in model]
    parts = [Part(linear, *pair, 0.5) for linear, pair in zip(model, pairs, strict=True)]
    x, upstream = torch.randn(9, 256, requires_grad=True), torch.randn(9, 384)
    y = lora_linear(x, parts)
    y.backward(upstream)
    grad = upstream.split([256, 128], 1)
    weights = [recipe.weight(dense(linear)) for linear in model]
    right = [
        recipe.output(x.detach(), w) + 0.5 * x.detach() @ a.t() @ b.t()
        for w, (a, b) in zip(weights, pairs, strict=True)
    ]
    torch.testing.assert_close(y.detach(), torch.cat(right, 1).detach(), rtol=1e-5, atol=1e-5)
    turned = [recipe.turned(dense(linear)) for linear in model]
    dx = sum(recipe.to_input(g, w) + 0.5 * g @ b @ a for g, w, (a, b) in zip(grad, turned, pairs, strict=True))
    torch.testing.assert_close(x.grad, dx.detach(), rtol=1e-4, atol=1e-4)
    a, b = pairs[0]
    torch.testing.assert_close(a.grad, 0.5 * (grad[0] @ b.detach()).t() @ x.detach(), rtol=1e-4, atol=1e-4)
    exact = sum(g @ dense(linear) for g, linear in zip(grad, model, strict=True))
    assert 1e-3 < ((dx - exact).norm() / exact.norm()).item() < 1.0


def rounded(x, kind):
    """x under the least power of two as a scale, in float64."""
    scale = 2.0 ** torch.log2(x.double().abs().amax() / torch.finfo(kind).max).ceil()
    return (x.double() / scale).to(kind).double() * scale


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_s_gradients_are_exact_but_for_the_product_that_goes_on_to_the_input(kind):
    """Against float64: y, dA and dB are those without the recipe, to the bit, and one product of dx is rounded."""
    pairs = [[each.requires_grad_() for each in factors(rows)] for rows in (256, 128)]
    x, upstream, found = torch.randn(9, 256, requires_grad=True), torch.randn(9, 384), []
    for recipe in (None, GRADIENTS):
        model = model_of(kind)
        if recipe is not None:
            set_recipe_(model, [*model], recipe)
        y = lora_linear(x, [Part(linear, *pair, 0.5) for linear, pair in zip(model, pairs, strict=True)])
        found.append((y, *torch.autograd.grad(y, [*pairs[0], *pairs[1], x], upstream)))
    *exact, plain = found[0]
    assert all(torch.equal(one, other) for one, other in zip(exact, found[1], strict=False))
    given = zip(model, pairs, upstream.split([256, 128], 1), rounded(upstream, E5M2).split([256, 128], 1), strict=True)
    dx = sum(
        codes @ rounded(dense(linear), E4M3) + 0.5 * grad.double() @ b.double() @ a.double()
        for linear, (a, b), grad, codes in given
    )
    torch.testing.assert_close(found[1][-1].double(), dx, rtol=1e-5, atol=1e-5)
    assert 0.01 < ((dx - plain).norm() / plain.norm()).item() < 0.1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("forward", ["packed", "masters"])
def test_a_master_gets_the_gradient_of_the_rounded_product(name, forward):
    recipe = recipe_of(name)
    model = model_of("fp8", master=lambda weight: weight + 1e-3)
    if forward == "masters":
        multiply_by_masters_(model)
    set_recipe_(model, [*model], recipe)
    x, upstream = torch.randn(9, 256), torch.randn(9, 256)
    for _ in range(2):
        y = model[0](x)
        y.backward(upstream)
    right = recipe.to_weight(upstream, x) if name == "tensorwise" else upstream.t() @ x
    torch.testing.assert_close(master_of(model[0]).grad, 2 * right, rtol=1e-5, atol=1e-4)
    weight = master_of(model[0]).detach() if forward == "masters" else model[0].unpack(torch.float32)
    torch.testing.assert_close(y.detach(), recipe.output(x, recipe.weight(weight)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dx_needed", [True, False])
@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
def test_linears_with_one_input_round_it_and_their_gradient_once(monkeypatch, kind, dx_needed):
    """As products of dy as a whole under one scale, whichever linear a column belongs to; the second has small ones."""
    seen, own = [], training.round_matrix
    monkeypatch.setattr(
        training, "round_matrix", lambda x, *given, **named: seen.append(tuple(x.shape)) or own(x, *given, **named)
    )
    model, recipe = model_of(kind, master=torch.clone), GRADIENTS
    set_recipe_(model, [*model], recipe)
    x, upstream = torch.randn(9, 256, requires_grad=dx_needed), torch.randn(9, 384)
    upstream[:, 256:] *= 1e-3
    product_of(model, x).backward(upstream)
    assert seen.count((9, 384)) == 1
    assert seen.count((9, 256)) == 1
    right = recipe.to_weight(upstream, x.detach()).split([256, 128])
    for linear, wanted in zip(model, right, strict=True):
        torch.testing.assert_close(master_of(linear).grad, wanted, rtol=1e-6, atol=1e-6)
    if dx_needed:
        (codes, scale), _ = recipe.upstream(upstream)
        weights = [recipe.turned(dense(linear)) for linear in model]
        dx = sum(
            (g * scale) @ (w.codes.float() * w.scale).t()
            for g, w in zip(codes.float().split([256, 128], 1), weights, strict=True)
        )
        torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-4)


def test_a_card_s_weights_are_turned_from_their_codes_to_the_same_gradient(monkeypatch):
    """By the kernel's twin here; alpha, which the codes lack, is not 1."""
    torch.manual_seed(0)
    dense = 0.02 * torch.randn(384, 256)
    scale = nvfp4.shared_global_scale([dense], "pow2", 2)
    tensors = nvfp4.quantize(dense, scale)
    weight = KernelWeight(QERL, *slab_layout.pack(tensors.packed, tensors.block_scale), 384, 256, float(scale))
    model = torch.nn.ModuleList([KernelLinear(weight, 0, 256, None), KernelLinear(weight, 256, 128, None)])
    for linear in model:
        linear.compute_dtype = torch.float32
        set_master_(linear, linear.unpack(torch.float32))
    set_recipe_(model, [*model], GRADIENTS)
    x, upstream = torch.randn(9, 256, requires_grad=True), torch.randn(9, 384)

    def gradient():
        x.grad = None
        product_of(model, x).backward(upstream)
        return x.grad

    right, asked = gradient(), []

    def turned(self, others=()):
        asked.append(1 + len(others))
        return decode.reference_turned(weight, 0, 384)

    monkeypatch.setattr(KernelLinear, "turned_to_fp8", turned)
    assert torch.equal(gradient(), right)
    assert asked == [2]


@pytest.mark.parametrize("trained", ["masters", "adapters"])
def test_the_mlp_s_own_kernel_finds_the_largest_magnitudes_that_its_gradients_are_rounded_by(monkeypatch, trained):
    seen, own = [], training.round_matrix

    def spy(x, *given, largest=None, **named):
        seen.append((tuple(x.shape), largest is not None))
        if largest is not None:
            assert largest.view(torch.float32) == x.abs().max()
        return own(x, *given, largest=largest, **named)

    monkeypatch.setattr(training, "round_matrix", spy)
    torch.manual_seed(3)
    mlp = torch.nn.Module()
    for name, shape in {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}.items():
        setattr(mlp, name, linear := torch.nn.Linear(*shape, bias=False).requires_grad_(False))
        if trained == "masters":
            set_master_(linear, linear.weight.detach().clone())
        else:
            pair = torch.randn(4, shape[0]).requires_grad_(), torch.randn(shape[1], 4).requires_grad_()
            linear.lora_part = partial(Part, linear, *pair)
    set_recipe_(mlp, [*mlp.children()], GRADIENTS)
    x = torch.randn(9, 64, requires_grad=True)
    mlp_forward(mlp, x).backward(torch.randn(9, 64))
    known = [shape for shape, known in seen if known]
    assert known == ([(9, 96), (9, 192)] if trained == "masters" else [(9, 192)])  # down's input; dy of gate and up
    assert {shape for shape, known in seen if not known} == {(9, 64), (64, 96), (96, 64)}
    assert x.grad.isfinite().all()


def test_the_product_for_a_master_in_bfloat16_is_rounded_to_it_before_it_is_added():
    model, recipe = model_of("dense", (256,), master=torch.Tensor.bfloat16), GRADIENTS
    set_recipe_(model, [*model], recipe)
    x, upstream = torch.randn(9, 256), torch.randn(9, 256)
    for _ in range(2):
        model[0](x).backward(upstream)
    product = recipe.to_weight(upstream, x).bfloat16()
    assert torch.equal(master_of(model[0]).grad, product + product)


@pytest.mark.parametrize("rounded", [0, 1])
def test_a_linear_without_the_recipe_beside_one_with_it_gets_an_exact_gradient(rounded):
    """As where `ignore` keeps q in 16 bits, and k and v are packed."""
    model, recipe = model_of("dense", master=torch.clone), GRADIENTS
    set_recipe_(model, [model[rounded]], recipe)
    x, upstream = torch.randn(9, 256), torch.randn(9, 384)
    product_of(model, x).backward(upstream)
    for number, (linear, grad) in enumerate(zip(model, upstream.split([256, 128], 1), strict=True)):
        right = recipe.to_weight(grad, x) if number == rounded else grad.t() @ x
        torch.testing.assert_close(master_of(linear).grad, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds_input", [True, False])
def test_blockwise_training_on_an_fp8_base_computes_forward_what_the_engine_does(rounds_input):
    model = model_of("fp8", rounds_input=rounds_input)
    x = torch.randn(5, 256)
    before = model[0](x)
    set_recipe_(model, [*model], recipe_of("blockwise"))
    codes = reference.FP8Tensor(model[0].weight_codes, model[0].weight_scale)
    torch.testing.assert_close(model[0](x), reference.product(x, codes))
    assert torch.equal(before, model[0](x)) == rounds_input


def test_an_engine_that_serves_the_trainer_s_modules_is_not_rounded():
    model, x = model_of("dense"), torch.randn(5, 256)
    before = model[0](x)
    set_recipe_(model, [*model], recipe_of("tensorwise"))
    with serving(model):
        torch.testing.assert_close(model[0](x), before)
    assert (model[0](x) - before).norm() / before.norm() > 0.005


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_of_gradients_leaves_the_forward_pass_to_the_bit(kind, name):
    """The backward pass is that of the whole recipe."""
    x, upstream, found = torch.randn(9, 256), torch.randn(9, 256), {}
    before = model_of(kind)[0](x)
    model = model_of(kind, master=lambda weight: weight + 1e-3)
    for products in ("gradients", "all"):
        set_recipe_(model, [*model], recipe_of(name, products=products))
        given = x.clone().requires_grad_()
        y = model[0](given)
        y.backward(upstream)
        found[products] = y.detach(), given.grad, master_of(model[0]).grad
        master_of(model[0]).grad = None
    y, dx, dw = found["gradients"]
    assert torch.equal(y, before)
    assert torch.equal(dx, found["all"][1])
    assert torch.equal(dw, found["all"][2])
    exact = upstream @ dense(model[0])
    assert 1e-3 < ((dx - exact).norm() / exact.norm()).item() < 0.1


def in_fp8(rows, apart):
    codes, scale = reference.quantize(rows)
    parts = [(codes[i:j], scale[i // 128 : j // 128]) for i, j in ((0, 256), (256, 384))]
    return [FP8Linear.from_tensors(*(each.clone() for each in part) if apart else part) for part in parts]


def in_16_bits(rows, apart):
    linears = [torch.nn.Linear(256, count, bias=False).requires_grad_(False) for count in (256, 128)]
    for linear, part in zip(linears, rows.split([256, 128]), strict=True):
        linear.weight = torch.nn.Parameter(part.clone() if apart else part, requires_grad=False)
    return linears


@pytest.mark.parametrize("linears_of", [in_fp8, in_16_bits])
@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_to_the_input_of_rows_of_one_weight_is_one_product(name, linears_of, monkeypatch):
    """Gate and up in an engine. It is the sum of what each gives alone, the adapters' terms included."""
    torch.manual_seed(0)
    rows, recipe, found, asked = torch.randn(384, 256), recipe_of(name, products="gradients"), {}, []
    together, apart = linears_of(rows, apart=False), linears_of(rows, apart=True)
    asks = "product" if name == "tensorwise" else "to_input"
    own = getattr(recipe, asks)
    monkeypatch.setattr(type(recipe), asks, lambda self, *given: asked.append(1) or own(*given))
    upstream, given = torch.randn(9, 384), torch.randn(9, 256)
    for which, linears in {"together": together, "apart": apart}.items():
        set_recipe_(torch.nn.ModuleList(linears), linears, recipe)
        x = given.clone().requires_grad_()
        lora_linear(x, [Part(each, *factors(each.out_features), 0.5) for each in linears]).backward(upstream)
        found[which] = x.grad, len(asked)
    assert (found["together"][1], found["apart"][1]) == (1, 3)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if name == "blockwise" else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(found["together"][0], found["apart"][0], **tolerance)
