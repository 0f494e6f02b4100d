"""The layouts of the kernels: they decode to the checkpoint, and products with them are right."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine_checks.context import Context


def dequantization(context: Context) -> dict:
    """The kernel layout decodes to the checkpoint in three ways.

    These are the policy's reading of a part, which is bit-exact; the torch twin's reading of the whole first layer,
    which is bit-exact too; and the values without the global scale that products use, which agree up to rounding.
    """
    from safetensors import safe_open

    from qerl.engine.vllm.policy import KernelLinear
    from qerl.formats.nvfp4 import kernel_layout, reference

    linears = {n: m for n, m in context.policy.named_modules() if isinstance(m, KernelLinear)}
    different, twin, unscaled, seconds, moved = {}, 0, 0, 0.0, 0
    for path in sorted(Path(context.arguments.model).glob("*.safetensors")):
        with safe_open(path, "pt", device="cuda") as handle:
            for key in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                name = key.removesuffix(".weight_packed")
                if not key.endswith(".weight_packed"):
                    continue
                tensors = [
                    handle.get_tensor(f"{name}.{leaf}")
                    for leaf in ("weight_packed", "weight_scale", "weight_global_scale")
                ]
                expected = reference.dequantize_unchecked(*tensors, torch.bfloat16)
                linear = linears.pop(name)
                wrong = _different_bits(linear.unpack(torch.bfloat16), expected)
                if wrong:
                    different[name] = wrong
                exact = linear.unscaled(torch.bfloat16)[0].float() / linear.kernel_weight.scale_factor / tensors[2]
                full = reference.dequantize_unchecked(*tensors, torch.float32)
                unscaled = max(unscaled, ((exact - full).abs().max() / full.abs().max()).item())
                if ".layers.0." in name and linear.row_start == 0:
                    rows = kernel_layout.dequantize(linear.kernel_weight, torch.bfloat16)[: linear.out_features]
                    twin += _different_bits(rows, expected)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    linear.unscaled(torch.bfloat16)[0]
                torch.cuda.synchronize()
                seconds += (time.perf_counter() - started) / 5
                moved += expected.nbytes + tensors[0].nbytes + tensors[1].nbytes
    return {
        "different": different,
        "missing": sorted(linears),
        "twin_different": twin,
        "unscaled_relative_error": unscaled,
        "gb_per_s": moved / seconds / 1e9 if seconds else 0,
    }


def _different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def product(context: Context) -> dict:
    """The forward pass and the input gradient of fused parts, against the same products in float64."""
    from qerl.engine.vllm.policy import KernelLinear
    from qerl.formats.fp8 import reference
    from qerl.formats.fp8.linear import FP8Linear

    worst = {"forward": 0.0, "backward": 0.0}
    for name, module in context.policy.named_modules():
        if not isinstance(module, KernelLinear | FP8Linear) or ".layers.1." not in f".{name}.":
            continue
        x = torch.randn(2, 37, module.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        weight = module.unpack(torch.float32).double()
        if module.start is not None:
            weight = weight + module.start[1].double() @ module.start[0].double()
        bias = 0 if module.bias is None else module.bias.double()
        inputs = x.detach()
        if isinstance(module, FP8Linear) and module.rounds_input:
            inputs = reference.dequantize_input(*reference.quantize_input(inputs, module.scales))
        expected = inputs.double() @ weight.t() + bias
        worst["forward"] = max(worst["forward"], _relative(y, expected))
        worst["backward"] = max(worst["backward"], _relative(x.grad, grad.double() @ weight))
    return worst


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()
