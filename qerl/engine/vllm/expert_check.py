"""The check of the product of experts when an engine opens: kernels and adapter against the decoded weights.

It also compiles the kernels that Triton makes for each size of blocks, which a rollout would otherwise wait for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from qerl.base.errors import ENGINE, EngineError
from qerl.engine.vllm.expert_lora import ExpertBuffers
from qerl.engine.vllm.expert_product import MARLIN_BLOCKS, ExpertProduct
from qerl.engine.vllm.experts import products, runners
from qerl.formats.nvfp4 import kernel_layout
from qerl.formats.nvfp4.kernel_experts import KernelExperts

logger = logging.getLogger(__name__)

LARGEST_ERROR = 0.02  # of the norm; rounding to bfloat16 leaves about 0.005
FILLED = 0.8  # of a block of pairs, in a batch that is made for this size of blocks
SPARE = 2  # experts that are compared beside those that one token has


def check_experts(model: nn.Module) -> None:
    """Raise EngineError unless the first layer with experts multiplies as the decoded weights do.

    All layers run the same kernels. The adapter's buffers hold zeros afterwards, as before. Warns of block scales that
    Marlin takes for zero.
    """
    layers = runners(model)
    if not layers:
        return
    _warn_of_dropped_scales([runner.routed_experts for runner in layers.values()])
    name, runner = next(iter(layers.items()))
    product, chosen = products(model)[name], runner.moe_config.experts_per_token
    weights = _Decoded(product, chosen)
    x = _randn(weights.hidden, max(token_counts(product.base.experts, chosen)), 0, weights.device)
    for tokens in token_counts(product.base.experts, chosen):
        error = weights.error(x[:tokens])
        if not error < LARGEST_ERROR:
            raise EngineError(
                "%s: the product of experts by %s is wrong by %s for %d tokens, against the decoded weights: write %s, "
                "and report this",
                *(name, product.base.name, f"{error:.1%}", tokens, ENGINE.set_to("transformers")),
            )
    weights.clear()


def _warn_of_dropped_scales(layers: Sequence[nn.Module]) -> None:
    dropped = [getattr(layer, "qerl_dropped_scales", 0) for layer in layers]
    if any(dropped):
        logger.warning(
            "Marlin takes %d block scales of experts in %d layers, all under 2^-6, for zero, and sampler and trainer "
            "then both do: global scales closer to the weights keep them (`qerl quantize`)",
            *(sum(dropped), sum(map(bool, dropped))),
        )


def token_counts(experts: int, chosen: int) -> list[int]:
    """Numbers of tokens, one for each size of blocks and a single one."""
    return [1, *(math.ceil(FILLED * block * experts / chosen) for block in MARLIN_BLOCKS)]


class _Decoded:
    """Some experts of a layer, decoded, with an adapter that changes outputs as much as the weights do."""

    def __init__(self, product: ExpertProduct, chosen: int) -> None:
        count = min(product.base.experts, chosen + SPARE)
        self.product, self.chosen = product, chosen
        self.experts = [expert * (product.base.experts - 1) // max(1, count - 1) for expert in range(count)]
        views = product.base.views()
        self.hidden, self.device = views[0].in_features, views[0].weight_device
        self.gate_up, self.down = ([_dense(view, expert) for expert in self.experts] for view in views)
        if product.adapter is not None:
            _fill_(product.adapter, self.gate_up[0].std(), self.down[0].std())

    def clear(self) -> None:
        """Let the adapter's buffers hold zeros."""
        if self.product.adapter is not None:
            for buffer in self.product.adapter.named().values():
                buffer.zero_()

    def error(self, x: torch.Tensor) -> float:
        """The norm of the difference over the norm of the output, for x (tokens, hidden) sent to these experts."""
        scores = _randn(len(self.experts), len(x), len(x), self.device).float()
        shares, places = scores.softmax(-1).topk(self.chosen)
        ids = torch.tensor(self.experts, device=x.device)[places].int()
        found = self.product(x, shares, ids).float()
        dense = torch.zeros_like(scores).scatter_(1, places, shares)
        right = sum(share[:, None] * self._of(place, x.float()) for place, share in enumerate(dense.t()))
        return float((found - right).norm() / right.norm())

    def _of(self, place: int, x: torch.Tensor) -> torch.Tensor:
        own, expert = self.product.adapter, self.experts[place]
        inner = x @ self.gate_up[place].t()
        if own is not None:
            inner += x @ _factor(own.gate_up_a, expert).t() @ own.gate_up_b[expert].float().t()
        gate, up = inner.chunk(2, -1)
        activation = F.silu(gate) * up
        out = activation @ self.down[place].t()
        if own is not None:
            out += activation @ own.down_a[expert].float().t() @ _factor(own.down_b, expert).t()
        return out


def _dense(view: nn.Module, expert: int) -> torch.Tensor:
    """The weight (out, in) of one expert in float32."""
    if isinstance(view, KernelExperts):
        return kernel_layout.dequantize(view.of_expert(expert), torch.float32)
    return view.weight[expert].float()


def _factor(factor: torch.Tensor, expert: int) -> torch.Tensor:
    return (factor if factor.dim() == 2 else factor[expert]).float()


def _fill_(own: ExpertBuffers, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Random factors whose products have the size of matrices with these standard deviations."""
    generator = torch.Generator(own.down_a.device).manual_seed(0)
    for a, b, std in ((own.gate_up_a, own.gate_up_b, gate_up), (own.down_a, own.down_b, down)):
        a.normal_(generator=generator).mul_(own.rank**-0.5)
        b.normal_(generator=generator).mul_(std.to(b.dtype))


def _randn(columns: int, rows: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, device=device, generator=generator).bfloat16()
