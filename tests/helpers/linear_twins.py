"""Packed linears of dense ones, and one beside its twin: a torch.nn.Linear with the dequantized weight."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qerl.formats.fp8 import reference as fp8_reference
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.linear import NVFP4Linear

IN, OUT = 80, 48


def packed_nvfp4(linear: nn.Linear, global_scale: torch.Tensor | None = None) -> NVFP4Linear:
    """A dense linear quantized as llm-compressor would; `global_scale` is as in `reference.quantize`."""
    packed = reference.quantize(linear.weight.detach(), global_scale)
    return NVFP4Linear.from_tensors(*packed, bias=linear.bias, compute_dtype=linear.weight.dtype)


def packed_fp8(linear: nn.Linear, scales: str = "pow2") -> FP8Linear:
    quantized = fp8_reference.quantize(linear.weight.detach(), scales)
    return FP8Linear.from_tensors(*quantized, bias=linear.bias, compute_dtype=linear.weight.dtype)


def packed_and_twin(dtype=torch.float32, bias=True, sizes=(IN, OUT), seed=0) -> tuple[NVFP4Linear, nn.Linear]:
    """A packed linear, and a dense one with the weight that compressed-tensors' formula gives."""
    torch.manual_seed(seed)
    twin = nn.Linear(*sizes, bias=bias).requires_grad_(False).to(dtype)
    packed = packed_nvfp4(twin)
    twin.weight.copy_(reference.dequantize(*buffers(packed).values(), dtype))
    return packed, twin


def buffers(linear: NVFP4Linear) -> dict[str, torch.Tensor]:
    return {name: getattr(linear, name) for name in ("weight_packed", "weight_scale", "weight_global_scale")}


def assert_same_bits(ours: NVFP4Linear, theirs: NVFP4Linear) -> None:
    for name, tensor in buffers(ours).items():
        expected = buffers(theirs)[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def output_and_gradient(module, x, autocast=False, checkpointed=False) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
    (gradient,) = torch.autograd.grad(y, x, torch.sin(torch.arange(y.numel())).reshape(y.shape).to(y.dtype))
    return y.detach(), gradient
