"""vLLM's experts of a layer with our product: NVFP4 in Marlin's layout, or 16 bits, and one adapter in static buffers.

The weights are loaded by vLLM into tensors of the checkpoint's layout. NVFP4 is then repacked in place, expert by
expert, with vLLM's own functions, so that nothing is in memory twice. vLLM 0.25.1 would choose among several kernels
that keep experts in other layouts; ours are always those that the trainer can read.

A router is a linear in 16 bits that has no adapter (`linear.RouterMethod`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
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
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_scales
from vllm.model_executor.utils import set_weight_attrs

from qerl.base.errors import ENGINE, EngineError
from qerl.engine.vllm.expert_lora import ExpertBuffers
from qerl.engine.vllm.expert_product import DenseBase, ExpertBase, ExpertProduct, MarlinBase
from qerl.engine.vllm.options import Options
from qerl.formats.nvfp4 import kernel_experts
from qerl.formats.nvfp4.kernel_experts import KernelExperts
from qerl.formats.nvfp4.kernel_layout import marlin_scale_factor, scales_marlin_drops
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

    def _finish(self, layer: RoutedExperts, base: ExpertBase) -> None:
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
        if not kernel_experts.takes(hidden_size, width):
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
    unlike = {
        "several cards": moe.moe_parallel_config.tp_size > 1 or moe.moe_parallel_config.use_ep,
        "biases": moe.has_bias,
        f"the activation {layer.activation.value}": layer.activation != MoEActivation.SILU,
        "a clamped activation": layer.swiglu_limit is not None,
        "router weights on the input": layer.apply_router_weight_on_input,
        "padded sizes": moe.hidden_dim != moe.hidden_dim_unpadded,
        "16-bit floats other than bfloat16": moe.in_dtype != torch.bfloat16,
    }
    if found := [name for name, is_so in unlike.items() if is_so]:
        raise EngineError(
            "%s has experts with %s, which qerl does not serve with vLLM: write %s",
            *(layer.layer_name, ", ".join(found), ENGINE.set_to("transformers")),
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
    shapes = kernel_experts.expected_shapes((experts, rows, columns))
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
