"""The straight-through gradient of masters: that of autograd through a weight which is quantized on the way."""

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qerl.formats.fp8 import reference as fp8
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.activations import Activations, round_by_twin
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model.layers import fuse_, recompute_by_
from qerl.model.lora import Part, lora_linear, parts_of
from qerl.model.master import add_gradient_, master_of, set_master_
from tests.helpers.layer_policies import TOKENS, tiny_model
from tests.helpers.linear_twins import packed_fp8, packed_nvfp4


class FakeQuantLinear(torch.nn.Linear):
    """The oracle: a dense master whose forward pass uses the quantized value, and maybe a rounded input, with the
    gradient of the identity."""

    packed: NVFP4Linear

    def forward(self, x):
        x = x + (round_by_twin(x.detach()) - x).detach() if self.packed.activations else x
        quantized = self.packed.unpack(self.weight.dtype)
        return torch.nn.functional.linear(x, self.weight + (quantized - self.weight).detach(), self.bias)


def with_master(linear, dtype, rounds=False):
    """(a packed linear of the same weight that has a master, its oracle)."""
    packed = packed_nvfp4(linear)
    packed.compute_dtype, packed.activations = dtype, Activations() if rounds else None
    oracle = FakeQuantLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=dtype)
    oracle.load_state_dict({name: value.to(dtype) for name, value in linear.state_dict().items()})
    oracle.packed = copy.deepcopy(packed)
    if linear.bias is not None:
        packed.bias = torch.nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    set_master_(packed, linear.weight.detach().to(dtype, copy=True))
    return packed, oracle.requires_grad_()


def close(value, expected, dtype):
    tight = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(value, expected, **tight)


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, False), (torch.float64, False), (torch.float32, True)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_the_gradient_of_linears_is_that_of_fake_quantization(dtype, rounds, fused, needs_input):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(48, rows, bias=bias) for rows, bias in ((32, True), (16, False))]
    pairs = [with_master(linear, dtype, rounds) for linear in linears]
    x = torch.randn(2, 7, 48, dtype=dtype, requires_grad=needs_input)
    upstream = torch.randn(2, 7, 48, dtype=dtype)
    ours = [packed for packed, _ in pairs]
    for _ in range(2):  # several backward passes add up
        y = lora_linear(x, parts_of(*ours)) if fused else torch.cat([packed(x) for packed in ours], -1)
        (y * upstream).sum().backward()
    grad_x, x.grad = x.grad, None
    expected = torch.cat([oracle(x) for _, oracle in pairs], -1)
    (2 * (expected * upstream).sum()).backward()
    close(y, expected, dtype)
    for packed, oracle in pairs:
        close(master_of(packed).grad, oracle.weight.grad, dtype)
    assert (grad_x is None) == (not needs_input)
    if needs_input:
        close(grad_x, x.grad, dtype)


def test_a_hook_and_a_checkpoint_keep_the_gradient():
    torch.manual_seed(1)
    packed, oracle = with_master(torch.nn.Linear(32, 16), torch.float32)
    calls = []
    packed.register_forward_hook(lambda *call: calls.append(call))
    x = torch.randn(5, 32)
    checkpoint(packed, x, use_reentrant=False).sum().backward()
    oracle(x).sum().backward()
    assert calls
    close(master_of(packed).grad, oracle.weight.grad, torch.float32)


def trained_pair(family, rounds):
    """(a fused model of packed linears with masters, the same model in transformers' layers over the oracle)."""
    ours, theirs = tiny_model(family), tiny_model(family)
    for name, module in list(ours.named_modules()):
        if isinstance(module, torch.nn.Linear) and "proj" in name:
            packed, oracle = with_master(module, torch.float32, rounds)
            ours.set_submodule(name, packed)
            theirs.set_submodule(name, oracle)
            if oracle.bias is not None:
                oracle.bias.requires_grad_(False)
    fuse_(ours)
    return ours, theirs


def loss_of(model, rows):
    return torch.log_softmax(model(rows).logits.float(), -1)[..., 3].sum()


@pytest.mark.parametrize(
    ("family", "recompute", "rounds"),
    [*itertools.product(["qwen2", "qwen3", "gemma"], [False, True], [False]), ("qwen3", False, True)],
)
def test_a_whole_model_has_the_gradients_of_fake_quantization(family, recompute, rounds):
    """Of qwen2 and qwen3 our layers are used; gemma's call their linears as modules."""
    ours, theirs = trained_pair(family, rounds)
    ours.train()
    if recompute:
        for layer in ours.model.layers:
            recompute_by_(layer, torch.float32)
            layer.gradient_checkpointing = True
    for rows in TOKENS.split(2 if rounds else 1):  # micro-batches add up
        loss_of(ours, rows).backward()
    loss_of(theirs, TOKENS).backward()
    masters = {name.removesuffix(".master"): p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(masters) == 14
    for name, master in masters.items():
        expected = theirs.get_submodule(name).weight.grad
        error = (master.grad - expected).norm() / expected.norm()
        assert error < (2e-3 if rounds else 1e-4), (name, error)  # a value may be rounded the other way


def test_bfloat16_products_add_up_in_float32():
    torch.manual_seed(2)
    packed, _ = with_master(torch.nn.Linear(32, 16), torch.float32)
    packed.compute_dtype = torch.bfloat16
    x, upstream = torch.randn(64, 32).bfloat16(), torch.randn(64, 16).bfloat16()
    packed(x).backward(upstream)
    expected = upstream.double().t() @ x.double()
    torch.testing.assert_close(master_of(packed).grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_master_is_not_the_weight_that_is_multiplied_by():
    packed, _ = with_master(torch.nn.Linear(32, 16), torch.float32)
    with torch.no_grad():
        before = packed(torch.eye(32))
        master_of(packed).add_(1.0)
    assert master_of(packed).grad is None
    assert torch.equal(packed(torch.eye(32)), before)
    packed.pack_(master_of(packed).detach() - 1.0)
    assert torch.equal(packed.unpack(torch.float32), reference.dequantize(*packed._buffers.values(), torch.float32))


# Last passed on an H200 on 2026-11-22.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_on_a_card_is_added_without_a_product_of_the_weights_size(dtype):
    torch.manual_seed(0)
    rows, columns, tokens = 2048, 4096, 512
    master = torch.nn.Parameter(torch.zeros(rows, columns, device="cuda", dtype=dtype))
    grad = torch.randn(tokens, rows + 64, device="cuda").bfloat16()[:, 32:-32]  # columns of a wider one
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    add_gradient_(master, grad, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    address = master.grad.data_ptr()
    add_gradient_(master, grad, x)
    assert torch.cuda.max_memory_allocated() - before < master.grad.nbytes / 2
    assert master.grad.data_ptr() == address
    expected = 2 * grad.double().t() @ x.double()
    error = (master.grad.double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_master_behind_fp8_gets_the_gradient_of_what_was_computed(scales, rounds):
    """y = Q(x) Q(W)^T: straight-through, the master's gradient is dy^T Q(x), and a packed-in adapter's follows it."""
    torch.manual_seed(0)
    x, dy = torch.randn(3000, 256), torch.randn(3000, 256)
    linears = [packed_fp8(torch.nn.Linear(256, 128, bias=False), scales) for _ in range(2)]
    for linear in linears:
        linear.rounds_input = rounds
    read = fp8.dequantize_input(*fp8.quantize_input(x, scales)) if rounds else x
    masters = [set_master_(linear, torch.zeros(128, 256)) for linear in linears]
    lora_linear(x, parts_of(*linears)).backward(dy)
    for master, columns in zip(masters, dy.split(128, 1), strict=True):
        torch.testing.assert_close(master.grad, columns.t() @ read, rtol=1e-4, atol=1e-3)

    a, b = torch.randn(4, 256, requires_grad=True), torch.randn(128, 4, requires_grad=True)
    base = packed_fp8(torch.nn.Linear(256, 128, bias=False), scales)
    base.rounds_input = rounds
    lora_linear(x, [Part(base, a, b, 0.5, packed_in=True)]).backward(dy[:, :128])
    of_weight = dy[:, :128].t() @ read
    torch.testing.assert_close(a.grad, 0.5 * b.detach().t() @ of_weight, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(b.grad, 0.5 * of_weight @ a.detach().t(), rtol=1e-4, atol=1e-2)
