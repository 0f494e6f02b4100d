"""Let a model's attention round its keys and values to 8 bits, as the cache of the engine that samples from it does.

The scales stand in the attention modules, as `kv_scales`, where the trainer's attention (training/policy/
packed_attention.py) and that of the transformers engine find them. Without them nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from qerl.base.errors import EngineError
from qerl.formats.fp8.kv import rounded

if TYPE_CHECKING:
    import torch

    from qerl.formats.fp8.kv import KVScales


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a transformers model, by the number of their layer."""
    return {one.layer_idx: one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "k_proj")}


def set_kv_scales_(model: nn.Module, scales: Mapping[int, KVScales] | None) -> int:
    """Round keys and values of each layer by these scales from now on, or no longer (None); returns how many layers do.

    Raises EngineError unless each attention module gets scales.
    """
    modules = attention_modules(model)
    if scales is not None and set(modules) != set(scales):
        raise EngineError(
            f"scales of keys and values are for {len(scales)} layers, and the model attends in {len(modules)}: write "
            "rollout.kv_cache_dtype: auto"
        )
    for layer, module in modules.items():
        module.kv_scales = None if scales is None else scales[layer]
    return len(modules)


def rounded_kv(module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of any shape as attention `module` attends to them: rounded if it has scales."""
    scales = getattr(module, "kv_scales", None)
    return (key, value) if scales is None else (rounded(key, scales.key), rounded(value, scales.value))
