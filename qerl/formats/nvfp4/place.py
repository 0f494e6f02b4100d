"""Put a loaded model's NVFP4 linears into the layout of our own kernels, as an engine's are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qerl.formats.nvfp4 import slab_layout
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.kernel_linear import KernelLinear
from qerl.formats.nvfp4.linear import NVFP4Linear

if TYPE_CHECKING:
    from torch import nn


def place_in_kernel_layout_(model: nn.Module, fused: Sequence[Sequence[str]]) -> int:
    """Replace NVFP4 linears by rows of weights in our layout; returns how many were replaced.

    `fused` has the names of linears of one module that read the same input, which become rows of one weight.

    Each group's own tensors are freed before the next is packed, so that at no time a second copy of the base exists.
    Nothing changes on a card without our kernels, nor in a model that does not compute in bfloat16.
    """
    from qerl.formats.cuda.nvrtc import has_kernels

    changed = 0
    for parent in list(model.modules()):
        for names in fused:
            linears = [getattr(parent, name, None) for name in names]
            if not all(type(linear) is NVFP4Linear and linear.compute_dtype == torch.bfloat16 for linear in linears):
                continue
            if not has_kernels(linears[0].weight_device):
                return changed
            for name, linear in zip(names, kernel_linears(linears), strict=True):
                setattr(parent, name, linear)
            changed += len(names)
    return changed


def kernel_linears(linears: Sequence[NVFP4Linear]) -> list[KernelLinear]:
    """The same linears over one weight in our layout, or over one each if their global scales or inputs differ."""
    alike = {(linear.fixed_scale, linear.activations, linear.in_features) for linear in linears}
    if len(alike) > 1:
        return [placed for linear in linears for placed in kernel_linears([linear])]
    codes = torch.cat([linear.weight_packed for linear in linears])
    scales = torch.cat([linear.weight_scale.view(torch.uint8) for linear in linears]).view(torch.float8_e4m3fn)
    words, laid_scales = slab_layout.pack(codes, scales)
    first, rows = linears[0], sum(linear.out_features for linear in linears)
    weight = KernelWeight(QERL, words, laid_scales, rows, first.in_features, first.fixed_scale)
    placed, start = [], 0
    for linear in linears:
        bias = None if linear.bias is None else linear.bias.detach()
        placed.append(KernelLinear(weight, start, linear.out_features, bias).train(linear.training))
        placed[-1].activations = linear.activations
        start += linear.out_features
    return placed
