"""What the engine uses of the model that vLLM has built: where sync and noise write, and which kernels multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qerl.engine.vllm.gains import Gains

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qerl.engine.options import EngineOptions
    from qerl.engine.vllm.sync import AdapterSlot


@dataclass(frozen=True)
class Found:
    """`model` is vLLM's. `slots` are places of an adapter on linears, `expert_slots` on experts; each may be empty."""

    model: nn.Module
    gains: Gains
    slots: Mapping[str, AdapterSlot]
    kernel: str  # what multiplies the base weights
    attention: str
    expert_slots: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def has_start(self) -> bool:
        """Whether a frozen start acts beside the base's weights."""
        return any(slot.frozen for slot in self.slots.values())

    @cached_property
    def linears(self) -> Mapping[str, nn.Linear]:
        """A frozen linear over its rows for each linear of the checkpoint, which syncs of whole weights write to."""
        from qerl.engine.vllm.policy import linear_views

        return linear_views(self.model)


def find(llm: Any, options: EngineOptions) -> Found:
    """Look through the model of vLLM's LLM. Raises EngineError if it is not built of what this plugin registers."""
    from vllm.model_executor.layers.linear import LinearBase

    from qerl.engine import vllm as vllm_plugin
    from qerl.engine.vllm.attention import attention_name
    from qerl.engine.vllm.expert_lora import expert_slots
    from qerl.engine.vllm.experts import kernel_names, products
    from qerl.engine.vllm.linear import RouterMethod, kernel_name
    from qerl.engine.vllm.norm import NoisyRMSNorm
    from qerl.engine.vllm.opening import asks_for_own_attention
    from qerl.engine.vllm.sync import adapter_slots

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    vllm_plugin.check(runner.model, runner, asks_for_own_attention(options.kv_cache_dtype))
    modules = dict(runner.model.named_modules())
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, LinearBase) and not isinstance(module.quant_method, RouterMethod)
    }
    experts = products(runner.model)
    return Found(
        model=runner.model,
        gains=Gains({name: module for name, module in modules.items() if isinstance(module, NoisyRMSNorm)}),
        slots=adapter_slots(linears, options.start.rank if options.start else 0) if options.linear_rank else {},
        kernel=" + ".join(sorted({kernel_name(layer) for layer in linears.values()}) + kernel_names(experts.values())),
        attention=attention_name(runner.model),
        expert_slots=expert_slots(
            {name: product.adapter for name, product in experts.items() if product.adapter is not None}
        ),
    )
