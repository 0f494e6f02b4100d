"""The product of a layer's experts in the engine: vLLM's kernels over the base, with our adapter between them.

NVFP4 experts are multiplied by vLLM's Marlin kernel, as stock vLLM does on Hopper, and 16-bit ones by its Triton
kernel. Both work on blocks of pairs (a token and one of its experts) that share an expert, and the kernels of the
adapter (`expert_kernels.py`) take the same blocks. vLLM calls this inside an operation that compilers do not look into.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_global_scale
from vllm.scalar_type import scalar_types
from vllm.triton_utils import tl

from qerl.engine.vllm.expert_kernels import Routing, activate, combine, expand_, shrink
from qerl.engine.vllm.expert_lora import ExpertBuffers
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.experts import ExpertWeights
from qerl.formats.nvfp4 import lora
from qerl.formats.nvfp4.kernel_experts import KernelExperts

MARLIN_BLOCKS = (8, 16, 32, 48, 64)  # pairs per block that its kernel is built for
FULL = 0.9  # blocks are made larger until they are less full than that (fused_marlin_moe in experts/marlin_moe.py)


class ExpertBase(Protocol):
    """The frozen weights of a layer's experts, and products with them; `name` is that of the kernel."""

    name: str
    experts: int

    def block(self, tokens: int, chosen: int) -> int:
        """How many pairs a block has."""

    def gate_up(self, x: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        """(pairs, 2 width) for x (tokens, hidden)."""

    def down(self, activation: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        """(pairs, hidden) for activation (pairs, width), times the pairs' weights (tokens, chosen)."""

    def views(self) -> tuple[nn.Module, nn.Module]:
        """The weights of both projections as the trainer reads them, in the very tensors that are multiplied by."""


class MarlinBase:
    """NVFP4 experts in Marlin's layout."""

    name = "marlin"

    def __init__(self, gate_up: KernelExperts, down: KernelExperts) -> None:
        self._gate_up, self._down = gate_up, down
        self.experts = gate_up.experts
        self._factors = [_kernel_scale(one) for one in (gate_up, down)]
        # The kernel leaves it as it found it, zero; stock vLLM fills a new one at each call.
        self._workspace = marlin_make_workspace_new(gate_up.weight_device, 4)

    def block(self, tokens: int, chosen: int) -> int:
        pairs = tokens * chosen / self.experts
        return next((block for block in MARLIN_BLOCKS if pairs / block < FULL), MARLIN_BLOCKS[-1])

    def gate_up(self, x: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._gate_up, self._factors[0], routing, weights, routing.chosen)

    def down(self, activation: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        return self._product(activation, self._down, self._factors[1], routing, weights, 1)

    def views(self) -> tuple[nn.Module, nn.Module]:
        return self._gate_up, self._down

    def _product(
        self,
        x: torch.Tensor,
        matrices: KernelExperts,
        factors: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        shares: int,
    ) -> torch.Tensor:
        """(pairs, out), times the pairs' weights where each has a row of its own (`shares` is 1)."""
        return ops.moe_wna16_marlin_gemm(
            x,
            x.new_empty(routing.count, matrices.out_features),
            matrices.words,
            None,
            matrices.scales,
            None,
            factors,
            None,
            None,
            None,
            self._workspace,
            routing.pairs,
            routing.experts,
            routing.padded,
            weights,
            moe_block_size=routing.block,
            top_k=shares,
            mul_topk_weights=shares == 1,
            b_q_type=scalar_types.float4_e2m1f,
            size_m=len(x),
            size_n=matrices.out_features,
            size_k=matrices.in_features,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )


class DenseBase:
    """16-bit experts: gate above up (experts, 2 width, hidden), and down (experts, hidden, width)."""

    name = "triton"

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = gate_up, down
        self.experts = len(gate_up)

    def block(self, tokens: int, chosen: int) -> int:
        return self._config(tokens, chosen)["BLOCK_SIZE_M"]

    def gate_up(self, x: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._gate_up, routing, None, routing.chosen)

    def down(self, activation: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        return self._product(activation, self._down, routing, weights, 1)

    def views(self) -> tuple[nn.Module, nn.Module]:
        return ExpertWeights.over(self._gate_up), ExpertWeights.over(self._down)

    def _config(self, tokens: int, chosen: int) -> dict[str, int]:
        return try_get_optimal_moe_config(self._gate_up.size(), self._down.size(), chosen, None, tokens)

    def _product(
        self, x: torch.Tensor, matrices: torch.Tensor, routing: Routing, weights: torch.Tensor | None, shares: int
    ) -> torch.Tensor:
        tokens = routing.count // routing.chosen
        out = x.new_empty(tokens, routing.chosen, matrices.shape[1])
        invoke_fused_moe_triton_kernel(
            x,
            matrices,
            out,
            None,
            None,
            weights,
            routing.pairs,
            routing.experts,
            routing.padded,
            weights is not None,
            shares,
            self._config(tokens, routing.chosen),
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
        return out.view(routing.count, -1)


class ExpertProduct:
    """y (tokens, hidden) of a layer's experts: base, and the adapter in its buffers if it has some."""

    def __init__(self, base: ExpertBase, adapter: ExpertBuffers | None) -> None:
        self.base, self.adapter = base, adapter

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """For x (tokens, hidden) in bfloat16; the ids (tokens, chosen) int32 and `weights` float32 are the router's."""
        x, weights, own = x.contiguous(), weights.contiguous(), self.adapter
        routing = self._routing(ids)
        inner = self.base.gate_up(x, routing, weights)
        if own is None:
            activation = x.new_empty(routing.count, inner.shape[1] // 2)
            torch.ops._C.silu_and_mul(activation, inner)
            return _summed(self.base.down(activation, routing, weights), x)
        h = _shared_shrink(x, own.gate_up_a) if own.shared else shrink(x, own.gate_up_a, routing)
        activation = activate(inner, h, own.gate_up_b, routing)
        y = self.base.down(activation, routing, weights)
        h = shrink(activation, own.down_a, routing)
        if own.shared:
            return combine(y, h, own.down_b, weights)
        return _summed(expand_(y, h, own.down_b, routing, weights), x)

    def _routing(self, ids: torch.Tensor) -> Routing:
        tokens, chosen = ids.shape
        block = self.base.block(tokens, chosen)
        pairs, experts, padded = moe_align_block_size(ids, block, self.base.experts, ignore_invalid_experts=True)
        return Routing(pairs, experts, padded, block, tokens * chosen, chosen)


def _kernel_scale(experts: KernelExperts) -> torch.Tensor:
    """What Marlin multiplies each expert's product by, float32 (experts,), as in vLLM's marlin_utils_fp4.py."""
    return nvfp4_marlin_process_global_scale(1.0 / experts.global_scale, torch.bfloat16) / experts.scale_factor


def _shared_shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x A^T (tokens, R), by our kernel where it pays off."""
    if lora.kernels_pay(*x.shape) and x.shape[1] % lora.COLUMN_STEP == 0 and has_kernels(x.device):
        return lora.shrink(x, a)
    return F.linear(x, a)


def _summed(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows of y (pairs, hidden), in the shape of x."""
    out = torch.empty_like(x)
    ops.moe_sum(y.view(len(x), -1, x.shape[1]), out)
    return out
