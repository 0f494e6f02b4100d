"""The check that linears of a checkpoint with 4-bit activations round their input on the way that serves them.

vLLM itself leaves activations in 16 bits where the card has no 4-bit products, and says only that it may be slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from qerl.checkpoint.activations import check_served
from qerl.engine.vllm.products import Base
from qerl.formats.nvfp4.kernel_linear import KernelLinear
from qerl.formats.nvfp4.ways import Shape

TOKENS = 8


def check_rounding(bases: Iterable[Base]) -> None:
    """Run one linear of each shape as the model runs it. Raises EngineError unless it multiplies by rounded rows."""
    checked: set[Shape] = set()
    for base in bases:
        if base.activations is None or base.shape in checked:
            continue
        checked.add(base.shape)
        layer, weight = base.layer, base.weight
        generator = torch.Generator(weight.words.device).manual_seed(0)
        x = torch.randn(TOKENS, weight.in_features, device=weight.words.device, generator=generator).bfloat16()
        dense = KernelLinear(weight, 0, weight.out_features, None).unpack(torch.float32)
        serve = partial(layer.quant_method.apply, layer, bias=getattr(layer, "bias", None))
        check_served(layer.prefix, serve, dense, layer.qerl_bias, x, base.activations)
