"""vLLM's experts of a layer with our product: NVFP4 in Marlin's layout, or 16 bits, and one adapter in static buffers.

vLLM loads the weights into tensors of the checkpoint's layout. NVFP4 is then repacked in place, expert by expert, with
vLLM's own functions, so that nothing is in memory twice. NVFP4 experts are multiplied by vLLM's Marlin kernel and
16-bit ones by its Triton kernel, since the trainer can read these layouts. Both work on blocks of pairs (a token and
one of its experts) that share an expert, and the kernels of the adapter (`kernels.py`) take the same blocks. vLLM calls
this inside an operation that compilers do not look into. A router is a 16-bit linear without an adapter
(`linear.KeptMethod`).

When an engine opens, `check_experts` compares the product with the decoded weights. That also compiles the Triton
kernels for each size of blocks, which a rollout would otherwise wait for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    FusedMoeWeightScaleSupported,
    MoEActivation,
    MoERunner,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new, marlin_permute_scales
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
    nvfp4_marlin_process_global_scale,
    nvfp4_marlin_process_scales,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.scalar_type import scalar_types
from vllm.triton_utils import tl

from qerl.base.errors import ENGINE, EngineError
from qerl.engine.vllm.kernels import Routing, activate, combine, expand_, shrink
from qerl.engine.vllm.linear import Options
from qerl.engine.vllm.sync import ExpertBuffers
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.experts import ExpertWeights
from qerl.formats.nvfp4 import lora
from qerl.formats.nvfp4.kernel_layout import (
    KernelExperts,
    expected_shapes,
    marlin_scale_factor,
    marlin_takes,
    scales_marlin_drops,
)
from qerl.formats.nvfp4.layout import BLOCK, BLOCK_SCALE, GLOBAL_SCALE, PACKED

GROUP = {"quant_method": FusedMoeWeightScaleSupported.GROUP.value}  # how vLLM's loader takes the scales
TENSOR = {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value}


class ExpertsMethod(FusedMoEMethodBase):
    """What vLLM asks of the experts of a layer, and is the same for both formats."""

    def __init__(self, layer: RoutedExperts, options: Options) -> None:
        super().__init__(layer.moe_config)
        self.options = options
        _check_kind(layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """vLLM's own kernels would read it."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """There is nothing to prepare: experts are on one card."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.qerl_product(x, topk_weights, topk_ids)

    def _finish(self, layer: RoutedExperts, base: MarlinBase | DenseBase) -> None:
        """Give the layer its product, and the adapter's buffers as buffers of the module."""
        adapter = None
        if self.options.expert_rank:
            sizes = (self.moe.num_experts, self.moe.intermediate_size, self.moe.hidden_dim)
            device = next(layer.parameters()).device
            adapter = ExpertBuffers.zeros(sizes, self.options.expert_rank, self.options.shares_outer, device)
            for name, tensor in adapter.named().items():
                layer.register_buffer(f"qerl_{name.replace('.', '_')}", tensor, persistent=False)
        layer.qerl_product = ExpertProduct(base, adapter)


class DenseExpertsMethod(ExpertsMethod):
    """Experts in 16 bits."""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        shapes = {"w13_weight": (num_experts, 2 * width, hidden_size), "w2_weight": (num_experts, hidden_size, width)}
        for name, shape in shapes.items():
            _register(layer, name, torch.empty(shape, dtype=params_dtype), attributes)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self._finish(layer, DenseBase(layer.w13_weight.data, layer.w2_weight.data))


class NVFP4ExpertsMethod(ExpertsMethod):
    """Experts in NVFP4: in the checkpoint's layout until they are loaded, then in Marlin's."""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        if not marlin_takes(hidden_size, width):
            raise EngineError(
                "%s: Marlin does not multiply by experts of %d x %d: write %s",
                *(layer.layer_name, width, hidden_size, ENGINE.set_to("transformers")),
            )
        for part, rows, columns, scales in (("w13", 2 * width, hidden_size, (2,)), ("w2", hidden_size, width, ())):
            codes = torch.empty(num_experts, rows, columns // 2, dtype=torch.uint8)
            blocks = torch.empty(num_experts, rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
            missing = torch.full((num_experts, *scales), float("nan"), dtype=torch.float32)
            _register(layer, f"{part}_{PACKED}", codes, attributes)
            _register(layer, f"{part}_{BLOCK_SCALE}", blocks, attributes | GROUP)
            _register(layer, f"{part}_{GLOBAL_SCALE}", missing, attributes | TENSOR)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self._finish(layer, MarlinBase(_repacked(layer, "w13"), _repacked(layer, "w2")))


def _register(layer: nn.Module, name: str, tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


def _check_kind(layer: RoutedExperts) -> None:
    """Raise EngineError for experts that our product does not compute."""
    moe: FusedMoEConfig = layer.moe_config
    plain = layer.activation == MoEActivation.SILU and layer.swiglu_limit is None and not moe.has_bias
    plain = plain and not layer.apply_router_weight_on_input and moe.hidden_dim == moe.hidden_dim_unpadded
    one_card = moe.moe_parallel_config.tp_size == 1 and not moe.moe_parallel_config.use_ep
    if not (plain and one_card and moe.in_dtype == torch.bfloat16):
        raise EngineError(
            "%s has experts of a kind that qerl does not serve with vLLM (only SwiGLU in bfloat16 without biases): "
            "write %s",
            *(layer.layer_name, ENGINE.set_to("transformers")),
        )


def _repacked(layer: RoutedExperts, part: str) -> KernelExperts:
    """The experts of one projection in Marlin's layout, in the memory of the loaded tensors, which they replace.

    Raises EngineError for global scales that are missing or that gate and up do not share.
    """
    codes, scales, global_scale = (
        getattr(layer, f"{part}_{name}").data.contiguous() for name in (PACKED, BLOCK_SCALE, GLOBAL_SCALE)
    )
    first = global_scale.view(len(codes), -1)[:, 0].contiguous()
    if not bool((first.isfinite() & (first > 0)).all()) or not bool(
        (global_scale.view(len(codes), -1) == first[:, None]).all()
    ):
        raise EngineError(
            f"{layer.layer_name}: an expert has no global scale, or gate and up have different ones, and vLLM takes "
            "one for both: quantize the 16-bit model with `qerl quantize`, which shares them"
        )
    layer.qerl_dropped_scales = getattr(layer, "qerl_dropped_scales", 0) + scales_marlin_drops(scales)
    shape, factor = (len(codes), codes.shape[1], 2 * codes.shape[2]), marlin_scale_factor(scales)
    words, blocks = repack_(codes, scales, factor)
    for name in (PACKED, BLOCK_SCALE, GLOBAL_SCALE):
        delattr(layer, f"{part}_{name}")
    for name, tensor in (("weight", words), (BLOCK_SCALE, blocks), (GLOBAL_SCALE, first)):
        layer.register_parameter(f"{part}_{name}", nn.Parameter(tensor, requires_grad=False))
    return KernelExperts(words, blocks, shape, first, factor)


def repack_(codes: torch.Tensor, scales: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Write Marlin's layout over codes uint8 (experts, out, in / 2) and e4m3 scales (experts, out, in / 16), in place.

    Returns views of the same memory: words int32 (experts, in / 16, 2 * out) and scales (experts, in / 16, out).
    """
    experts, rows, columns = len(codes), codes.shape[1], 2 * codes.shape[2]
    shapes = expected_shapes((experts, rows, columns))
    words, blocks = codes.view(torch.int32).view(shapes[0]), scales.view(shapes[1])
    no_order = torch.empty(0, dtype=torch.int, device=codes.device)
    for expert in range(experts):
        turned = codes[expert].view(torch.int32).t().contiguous()
        own = scales[expert].to(torch.bfloat16).t().contiguous()
        words[expert] = ops.gptq_marlin_repack(
            b_q_weight=turned, perm=no_order, size_k=columns, size_n=rows, num_bits=4, is_a_8bit=False
        )
        permuted = marlin_permute_scales(s=own, size_k=columns, size_n=rows, group_size=BLOCK)
        blocks[expert] = nvfp4_marlin_process_scales(permuted, scale_factor=factor, a_dtype=torch.bfloat16)[0]
    return words, blocks


def kernel_names(found: Iterable[ExpertProduct]) -> list[str]:
    """What multiplies by experts, for the log."""
    return sorted({f"{product.base.name} (experts)" for product in found})


def runners(model: nn.Module) -> dict[str, MoERunner]:
    """The layers with experts of vLLM's model, by the name of the experts in a checkpoint, from first to last."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoERunner)}
    return dict(sorted(found.items(), key=lambda one: one[1].layer_id))


def products(model: nn.Module) -> dict[str, ExpertProduct]:
    """The products of these layers. Raises EngineError for experts that are not ours."""
    found = {}
    for name, runner in runners(model).items():
        layer = runner.routed_experts
        if not isinstance(layer.quant_method, ExpertsMethod):
            raise EngineError(
                f"vLLM multiplies by the experts of {name} with {type(layer.quant_method).__name__} and not by qerl's; "
                "their adapter would not act. Another vLLM plugin may interfere (VLLM_PLUGINS= switches plugins off), "
                "or this vLLM is not the supported version 0.25.1"
            )
        found[name] = layer.qerl_product
    return found


MARLIN_BLOCKS = (8, 16, 32, 48, 64)  # pairs per block that its kernel is built for
FULL = 0.9  # blocks are made larger until they are less full than that (fused_marlin_moe in experts/marlin_moe.py)


class MarlinBase:
    """NVFP4 experts of a layer in Marlin's layout, and products with them; `name` names the kernel."""

    name = "marlin"

    def __init__(self, gate_up: KernelExperts, down: KernelExperts) -> None:
        self._gate_up, self._down = gate_up, down
        self.experts = gate_up.experts
        self._factors = [_kernel_scale(one) for one in (gate_up, down)]
        # The kernel leaves it as it found it, zero; stock vLLM fills a new one at each call.
        self._workspace = marlin_make_workspace_new(gate_up.weight_device, 4)

    def block(self, tokens: int, chosen: int) -> int:
        """How many pairs a block has."""
        pairs = tokens * chosen / self.experts
        return next((block for block in MARLIN_BLOCKS if pairs / block < FULL), MARLIN_BLOCKS[-1])

    def gate_up(self, x: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        """(pairs, 2 width) for x (tokens, hidden)."""
        return self._product(x, self._gate_up, self._factors[0], routing, weights, routing.chosen)

    def down(self, activation: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
        """(pairs, hidden) for activation (pairs, width), times the pairs' weights (tokens, chosen)."""
        return self._product(activation, self._down, self._factors[1], routing, weights, 1)

    def views(self) -> tuple[nn.Module, nn.Module]:
        """The weights of both projections as the trainer reads them, in the very tensors that are multiplied by."""
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
    """The same of 16-bit experts: gate above up (experts, 2 width, hidden), and down (experts, hidden, width)."""

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

    def __init__(self, base: MarlinBase | DenseBase, adapter: ExpertBuffers | None) -> None:
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
        self.gate_up, self.down = (
            [view.dense_expert(expert, torch.float32) for expert in self.experts] for view in views
        )
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
