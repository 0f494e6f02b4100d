"""FP8 on a card: our quantizer and products against vLLM's own functions.

Last run on an H200 on 2026-11-26: all passed, with the others of this folder.
"""

from functools import partial

import pytest
import torch

from qerl.formats.fp8 import reference
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.fp8.training import Tensorwise, quantize_tensor, recipe_of, scaled_product
from qerl.plan.sizes import rounding_work

pytestmark = pytest.mark.gpu

SHAPES = [(256, 512), (3584, 3584), (200, 384)]


def weight(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (0.02 * torch.randn(shape, device="cuda", generator=generator)).to(dtype)


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_those_of_per_block_cast_to_fp8(shape, dtype, scales):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    ours = reference.quantize(weight(shape, dtype), scales)
    theirs = per_block_cast_to_fp8(weight(shape, dtype), [128, 128], use_ue8m0=scales == "pow2")
    if scales == "pow2":
        assert same_bits(ours.codes, theirs[0])
        assert torch.equal(ours.scale, theirs[1])
    else:  # vLLM's codes of the largest shape were not ours in every bit on an H200
        assert (ours.codes.float() != theirs[0].float()).float().mean() < 1e-3
        assert torch.allclose(ours.scale, theirs[1], rtol=2**-22, atol=0)
    on_cpu = reference.quantize(weight(shape, dtype).cpu(), scales)
    assert same_bits(ours.codes.cpu(), on_cpu.codes)
    assert torch.equal(ours.scale.cpu(), on_cpu.scale)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_inputs_are_quantized_as_by_per_token_group_quant_fp8(scales):
    """Bit-equal under powers of two. Other scales may differ in the last bit by how the kernel divides."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = 50 * weight((70, 1024), seed=1)
    x[3, :128] = 0
    codes, scale = per_token_group_quant_fp8(x, 128, use_ue8m0=scales == "pow2")
    ours = reference.quantize_input(x, scales)
    if scales == "pow2":
        assert torch.equal(ours.scale, scale)
        assert same_bits(ours.codes, codes)
    else:
        torch.testing.assert_close(ours.scale, scale, rtol=2.4e-7, atol=0)
        assert (ours.codes.view(torch.uint8) == codes.view(torch.uint8)).float().mean() > 0.999


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 200, 1024])
def test_the_product_is_that_of_the_decoded_sides(tokens, scales):
    from qerl.engine.vllm.fp8 import product

    tensors = reference.quantize(weight((3584, 18944)), scales)
    x = 50 * weight((tokens, 18944), seed=1)
    found = product(x, *tensors, scales).float()
    right = reference.product(x.float(), tensors, scales)
    assert (found - right).norm() / right.norm() < 0.004
    assert torch.equal(found, product(x, *tensors, scales).float())  # it repeats


@pytest.mark.parametrize(("shape", "dtype"), [((256, 512), torch.float32), ((200, 384), torch.bfloat16)], ids=str)
def test_what_no_kernel_takes_is_multiplied_in_plain_torch(shape, dtype):
    """A model in float32, as the oracle of check_engine.py is, ended in an assertion."""
    from qerl.engine.vllm.fp8 import product

    tensors, x = reference.quantize(weight(shape)), 50 * weight((7, shape[1]), dtype, seed=1)
    found = product(x, *tensors, "pow2")
    assert found.dtype == dtype
    assert torch.equal(found, reference.product(x, tensors))


@pytest.mark.parametrize("tokens", [5, 300])
def test_a_part_of_a_fused_weight_has_the_rows_of_the_whole_product(tokens):
    """The trainer multiplies by the parts, the engine by the whole."""
    from qerl.engine.vllm.fp8 import product

    codes, scale = reference.quantize(weight((4608, 3584)))
    x = 50 * weight((tokens, 3584), seed=1)
    whole = product(x, codes, scale, "pow2").float()
    parts = [
        product(x, codes[i:j], scale[i // 128 : -(-j // 128)], "pow2")
        for i, j in ((0, 3584), (3584, 4096), (4096, 4608))
    ]
    error = (torch.cat(parts, 1).float() - whole).norm() / whole.norm()
    assert error < 0.002, error


def test_the_trainer_s_linear_multiplies_by_the_engine_s_product_and_goes_back_in_16_bits():
    import qerl.engine.vllm.fp8 as engine

    tensors = reference.quantize(weight((512, 1024)))
    linear = FP8Linear.from_tensors(*tensors, compute_dtype=torch.bfloat16)
    x = (50 * weight((40, 1024), seed=1)).requires_grad_()
    y = linear(x)
    assert torch.equal(y, engine.product(x.detach(), *tensors, "pow2"))
    y.sum().backward()
    right = torch.ones(40, 512, device="cuda") @ reference.dequantize(*tensors, torch.float32)
    assert (x.grad.float() - right).norm() / right.norm() < 0.004


def test_the_engine_adds_bias_and_adapter_to_the_product():
    from qerl.engine.vllm.fp8 import linear_product
    from qerl.formats.nvfp4.lora import Adapter, product_with_adapter

    tensors = reference.quantize(weight((512, 1024)))
    x, bias = 50 * weight((33, 1024), seed=1), weight((512,), seed=2)
    a, b = weight((16, 1024), seed=3), weight((512, 16), seed=4)
    exact = x.float() @ reference.dequantize(*tensors, torch.float32).t()
    for inputs, base in (("pow2", reference.product(x.float(), tensors)), (None, exact)):
        plain = linear_product(x, tensors, inputs, bias).float()
        assert (plain - base - bias.float()).norm() / base.norm() < 0.005
        base_alone = partial(linear_product, x, tensors, inputs, None)
        both = product_with_adapter(base_alone, x, Adapter(a, b, (512,)), bias)
        right = base + bias.float() + x.float() @ a.float().t() @ b.float().t()
        assert (both.float() - right).norm() / right.norm() < 0.006


def relative(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("gradients", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tokens", [7, 64, 1000])
def test_tensorwise_products_are_those_of_the_rounded_matrices(tokens, gradients):
    recipe, x, grad = Tensorwise(gradients), weight((tokens, 512), seed=1), weight((tokens, 1024), seed=2)
    dense = weight((1024, 512))
    held = recipe.weight(dense)
    (w, w_scale), (a, a_scale) = held, quantize_tensor(x)
    g, g_scale = quantize_tensor(grad, recipe.gradients)
    w, a, g = w.double() * w_scale, a.double() * a_scale, g.double() * g_scale
    assert relative(recipe.output(x, held), a @ w.t()) < 0.004
    assert relative(recipe.to_input(grad, recipe.turned(dense)), g @ w) < 0.004
    found = recipe.to_weight(grad, x)
    assert found.dtype == torch.float32
    assert relative(found, g.t() @ a) < 1e-3
    assert relative(found, (grad.double().t() @ x.double())) < 0.1


@pytest.mark.parametrize("out_features", [1024, 4608, 200])
def test_blockwise_gradients_to_the_input_are_those_of_groups_and_transposed_blocks(out_features):
    import qerl.engine.vllm.fp8  # noqa: F401  it brings the card's product

    recipe, tensors = recipe_of("blockwise"), reference.quantize(weight((out_features, 512)))
    grad = weight((300, out_features), seed=2)
    right = reference.dequantize_input(*reference.quantize_input(grad)).double()
    right = right @ reference.dequantize(*tensors, torch.float64)
    assert relative(recipe.to_input(grad, recipe.turned(tensors)), right) < 0.004


@pytest.mark.parametrize(("name", "trains"), [("tensorwise", True), ("tensorwise", False), ("blockwise", True)])
def test_a_recipe_takes_what_the_plan_counts_for_it(name, trains):
    """The plan counts from where the activation's gradient is gone."""
    import qerl.engine.vllm.fp8  # noqa: F401  it brings the card's product

    hidden, intermediate, tokens = 1024, 4096, 4096
    recipe, dense = recipe_of(name), weight((2 * intermediate, hidden))
    grad = weight((tokens, 2 * intermediate), seed=2)
    for _ in range(2):  # the first time allocates workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if name == "tensorwise":  # with masters dy is rounded for both of its products
            rounded = recipe.upstream(grad, trains=trains)
            scaled_product(rounded.plain, recipe.turned(dense), grad.dtype)
            del rounded
        else:
            recipe.to_input(grad, recipe.turned(dense))
        peak = torch.cuda.max_memory_allocated() - before
    work = rounding_work(name, hidden, intermediate, masters=trains)
    counted = (work.token + 2 * intermediate) * tokens + work.weight
    assert 0.5 * counted < peak < 1.02 * counted
