"""How an open vLLM takes over an update: written in place, into what the captured graphs and the policy model read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.base.errors import EngineError
from qerl.engine.update import BESIDE_A_START, AdapterUpdate, Update, WeightsUpdate, check_fit, pack_weights_
from qerl.engine.vllm.expert_lora import copy_to_experts_, of_experts
from qerl.engine.vllm.sync import copy_adapter_, split_adapter

if TYPE_CHECKING:
    from qerl.engine.vllm.found import Found


def take_(update: Update, found: Found, max_rank: int, device: int) -> None:
    """Overwrite the adapter, or the weights and the trained norms. Raises EngineError for what does not fit."""
    if isinstance(update, AdapterUpdate):
        experts = of_experts(update.tensors, found.expert_slots)
        others = {name: tensor for name, tensor in update.tensors.items() if name not in experts}
        factors, norms = split_adapter(others, found.slots, found.gains.norms, max_rank)
        copy_adapter_(factors, found.slots, update.scaling)
        copy_to_experts_(experts, found.expert_slots, update.scaling)
        found.gains.set_trained_(norms)
    else:
        if found.has_start:
            raise EngineError(BESIDE_A_START)
        _take_weights_(update, found, device)


def _take_weights_(update: WeightsUpdate, found: Found, device: int) -> None:
    import torch

    check_fit(update, found.linears, {name: norm.gain for name, norm in found.gains.norms.items()})
    pack_weights_(update.weights, found.linears)
    found.gains.set_trained_(update.norms)
    torch.cuda.synchronize(device)  # a product may read its weight before the launch ahead of it has ended
