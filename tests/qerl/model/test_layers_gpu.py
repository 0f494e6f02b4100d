"""The kernels of the layers on a GPU against their twins, and a fused linear against plain products.

Last run on an H200, 2026-11-22.
"""

import functools

import pytest
import torch

from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import E5M2, quantize_tensor, recipe_of
from qerl.formats.nvfp4 import kernel_layout, slab_layout
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, QERL, KernelLinear, KernelWeight
from qerl.model import elementwise, twins
from qerl.model.lora import Part, lora_linear
from qerl.model.products import set_recipe_

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_seed")]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

if torch.cuda.is_available():
    from qerl.model import kernels


def close(value, twin):
    """Equal, except for the last bit of some 16-bit values."""
    assert value.dtype == twin.dtype
    tolerance = 1e-5 if twin.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(value, twin, rtol=tolerance, atol=tolerance * twin.float().abs().max().item() / 8)


def check_backward(grad, normed, skip=None, dtype=None):
    """Check the backward pass with a trained weight, whose gradient repeats to the bit, and with a frozen one."""
    for trained in (True, False):
        dx, dw = kernels.norm_backward(grad, normed, trained, skip, dtype)
        expected_dx, expected_dw = twins.norm_backward(grad, normed, trained, skip, dtype)
        assert dx.dtype == (dtype or normed.x.dtype)
        close(dx, expected_dx)
        assert (dw is None) == (not trained)
        if trained:
            torch.testing.assert_close(dw, expected_dw, rtol=1e-4, atol=1e-3)
            assert torch.equal(dw, kernels.norm_backward(grad, normed, True, skip)[1])


@DTYPES
@pytest.mark.parametrize("shape", [(300, 1, 3584), (33, 28, 128), (2, 7, 8192)], ids=str)
def test_norms(dtype, shape):
    wide = torch.randn(shape[0], shape[1] * shape[2] + 64, device="cuda", dtype=dtype)
    x = wide[:, : shape[1] * shape[2]].unflatten(1, shape[1:])
    weight, grad = torch.randn(shape[2], device="cuda"), torch.randn(shape, device="cuda", dtype=dtype)
    normed, out = kernels.norm_forward(x, weight, 1e-6)
    twin, expected = twins.norm_forward(x, weight, 1e-6)
    close(out, expected)
    close(normed.scale, twin.scale)
    check_backward(grad, normed)


@DTYPES
@pytest.mark.parametrize("stream", [torch.float32, None], ids=["wide", "alike"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_beside_the_residual_stream(dtype, stream, adds):
    """The stream is in float32. What is kept of it, the norm, and the gradients inside a layer have `dtype`."""
    delta, skip, grad = (torch.randn(300, 1, 3584, device="cuda", dtype=dtype) for _ in range(3))
    x, weight = torch.randn(300, 1, 3584, device="cuda", dtype=stream or dtype), torch.randn(3584, device="cuda")
    given = x, weight, 1e-6, delta if adds else None, dtype
    normed, out = kernels.norm_forward(*given)
    twin, expected = twins.norm_forward(*given)
    assert torch.equal(normed.x, twin.x)
    assert (normed.x is x) == (not adds and x.dtype == dtype)
    assert normed.x.dtype == out.dtype == dtype
    close(out, expected)
    close(normed.scale, twin.scale)
    check_backward(grad, normed, skip)
    check_backward(grad, normed, skip, x.dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 300, 3584), (3, 7, 50), (0, 8)], ids=str)
def test_a_sum_of_three(dtype, shape):
    parts = [torch.randn(shape, device="cuda", dtype=kind) for kind in (torch.float32, dtype, dtype)]
    out = kernels.sum_three(*parts)
    assert out.dtype == torch.float32
    assert torch.equal(out, twins.sum_three(*parts))


@DTYPES
def test_swiglu(dtype):
    x, grad = torch.randn(130, 2 * 2600, device="cuda", dtype=dtype), torch.randn(130, 2600, device="cuda", dtype=dtype)
    close(kernels.swiglu_forward(x), twins.swiglu_forward(x))
    ours, twin = grad.clone(), grad.clone()
    close(kernels.swiglu_backward_(x, ours), twins.swiglu_backward_(x, twin))
    close(ours, twin)


def test_another_number_of_rows_compiles_no_further_kernel(compiled):
    """A rollout ends with any number of tokens, and Triton compiles a kernel for each way an argument is divisible."""
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    norm = elementwise.RMSNorm(torch.nn.Parameter(weight), 1e-6)

    def layer(rows):
        stream = torch.randn(1, rows, 512, device="cuda", requires_grad=True)
        cos = torch.randn(rows, 32, device="cuda")
        x, delta = elementwise.add_and_norm(stream, norm)
        total, out = elementwise.add_and_norm(x, norm, delta, stream)
        out = norm(elementwise.exact_sum(total, (stream, delta), out))
        q, k, v = elementwise.rotary_parts_((out * 1.0)[0], cos, cos, [4, 2, 2])
        kernels.swiglu_backward_(out[0].detach(), kernels.swiglu_forward(out[0].detach()))
        (q.sum() + k.sum() + v.sum()).backward()

    layer(48)
    compiled.clear()
    for rows in (1, 47, 64, 33):
        layer(rows)
    assert compiled == []


@DTYPES
@pytest.mark.parametrize("width", [64, 96, 128, 256])  # with 96, a program has columns outside of the head
@pytest.mark.parametrize("counts", [(28, 4, 4), (5, 1, 2), (48, 8, 8)], ids=str)
def test_rotary(dtype, counts, width):
    x = torch.randn(65, sum(counts) * width, device="cuda", dtype=dtype)
    angle = torch.randn(65, width // 2, device="cuda").repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = x.unflatten(1, (-1, width)).clone()
    rotated = expected[:, : counts[0] + counts[1]]
    twins.rotate_(rotated, rotated, cos, sin, 1)
    leaf = x.clone().requires_grad_()
    parts = elementwise.rotary_parts_(leaf * 1.0, cos, sin, counts)
    close(torch.cat(parts, 1), expected)
    grads = [torch.randn_like(part) for part in parts]
    torch.autograd.backward(parts, grads)
    expected = torch.cat(grads, 1)
    rotated = expected[:, : counts[0] + counts[1]]
    twins.rotate_(rotated, rotated, cos, sin, -1)
    close(leaf.grad, expected.flatten(1))
    query = grads[0].clone().requires_grad_()
    elementwise.rotary_(query * 1.0, cos, sin).backward(grads[0])
    close(query.grad, twins.rotate_(torch.empty_like(grads[0]), grads[0], cos, sin, -1))


def random_weight(layout, rows, columns):
    """A weight with random codes, and block scales from 0.5 to 1.875."""
    scales = torch.randint(48, 64, (rows, columns // 16), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    if layout is QERL:
        packed = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        words, scales = slab_layout.pack(packed, scales)
    else:
        words, scales = torch.randint(-(2**31), 2**31, (columns // 16, 2 * rows), device="cuda").int(), scales.t()
    return KernelWeight(layout, words, scales.contiguous(), rows, columns, 97.0)


@pytest.mark.parametrize("layout", [QERL, HUMMING_WGMMA], ids=["qerl", "humming"])
@pytest.mark.parametrize("rows", [[3584, 512, 512], [1024, 1024]], ids=str)
def test_a_fused_linear_with_its_adapters(rows, layout):
    columns, rank, device = 512, 32, "cuda"
    weight = random_weight(layout, sum(rows), columns)
    dense = kernel_layout.dequantize(weight, torch.float32).split(rows)
    linears = [
        KernelLinear(weight, sum(rows[:index]), size, torch.randn(size, device=device).bfloat16())
        for index, size in enumerate(rows)
    ]
    draw = functools.partial(torch.randn, device=device)
    pairs = [(draw(rank, columns) / 20, draw(size, rank) / 5) for size in rows]
    x = torch.randn(1, 700, columns, device=device).bfloat16()
    upstream = torch.randn(1, 700, sum(rows), device=device).bfloat16()
    leaves = [x, *(factor for pair in pairs for factor in pair)]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out = lora_linear(x, [Part(linear, a, b, 0.7) for linear, (a, b) in zip(linears, pairs, strict=True)])
    assert out.dtype == torch.bfloat16
    grads, wide = torch.autograd.grad(out, leaves, upstream), x.float()
    terms = [
        torch.nn.functional.linear(wide, matrix, linear.bias.float()) + 0.7 * (wide @ a.t()) @ b.t()
        for matrix, linear, (a, b) in zip(dense, linears, pairs, strict=True)
    ]
    expected = torch.cat(terms, -1)
    right = expected, *torch.autograd.grad(expected, leaves, upstream.float())
    for value, other in zip((out, *grads), right, strict=True):
        assert (value.float() - other.float()).norm() / other.float().norm() < 1e-2
    assert {grad.dtype for grad in grads[1:]} == {torch.float32}


def rounded(x, kind):
    """x under the least power of two as a scale, in float64."""
    codes, scale = quantize_tensor(x, kind)
    return codes.double() * scale.double()


@pytest.mark.parametrize("packs", [True, False], ids=["nvfp4", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [((3584, 512, 512), 512), ((576, 192, 192), 576)], ids=str)
def test_gradients_in_fp8_round_one_product_of_an_adapter_alone(rows, columns, packs):
    """As qerl/model/test_products.py has it on a CPU. The bases are rows of one tensor, as an engine has them."""
    weight = random_weight(QERL, sum(rows), columns)
    matrix, alpha = KernelLinear(weight, 0, sum(rows), None).unscaled(torch.float32)
    matrix = matrix.clone() if packs else (matrix * alpha).bfloat16()  # alpha is beside the codes, not in them
    starts = [sum(rows[:index]) for index in range(len(rows))]
    draw = functools.partial(torch.randn, device="cuda")
    pairs = [(draw(32, columns) / 20, draw(size, 32) / 5) for size in rows]
    x = torch.randn(700, columns, device="cuda").bfloat16()
    upstream = 1e-4 * torch.randn(700, sum(rows), device="cuda").bfloat16()
    leaves, found = [x, *(factor for pair in pairs for factor in pair)], []
    for leaf in leaves:
        leaf.requires_grad_()
    for recipe in (None, recipe_of("tensorwise", products="gradients")):
        linears = [KernelLinear(weight, start, size, None) for start, size in zip(starts, rows, strict=True)]
        if not packs:
            linears = [torch.nn.Linear(columns, size, bias=False) for size in rows]
            for linear, part in zip(linears, matrix.split(rows), strict=True):
                linear.weight = torch.nn.Parameter(part, requires_grad=False)
        for linear in linears if packs else ():
            linear.compute_dtype = torch.bfloat16
        if recipe is not None:
            set_recipe_(torch.nn.ModuleList(linears), linears, recipe)
        y = lora_linear(x, [Part(linear, *pair, 0.7) for linear, pair in zip(linears, pairs, strict=True)])
        found.append((y, *torch.autograd.grad(y, leaves, upstream)))
    for place in {*range(len(found[0]))} - {1}:
        assert torch.equal(found[0][place], found[1][place])
    dx = rounded(upstream, E5M2) @ rounded(matrix, E4M3) * (alpha if packs else 1.0)
    for (a, b), grad in zip(pairs, upstream.double().split(rows, 1), strict=True):
        dx += 0.7 * grad @ b.detach().bfloat16().double() @ a.detach().bfloat16().double()
    plain, value = found[0][1].double(), found[1][1].double()
    assert (value - dx).norm() / dx.norm() < 0.006
    assert 0.01 < (value - plain).norm() / plain.norm() < 0.1
