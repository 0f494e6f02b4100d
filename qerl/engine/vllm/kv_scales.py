"""Write the scales of 8-bit keys and values into vLLM's attention layers, where captured graphs read them.

vLLM 0.25.1 keeps them as float32 buffers of the layer (`_k_scale`, `_v_scale`, and `_q_scale` where queries are rounded
too), which our kernel, FlashAttention and vLLM's Triton kernel read on the card, so that they can change under captured
graphs.
Backends that take them from the host when a graph is captured (FlashInfer) cannot be calibrated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    from qerl.engine.kv_scales import KVScales

READ_ON_THE_CARD = ("FlashAttentionImpl", "TritonAttentionImpl")


def attention_layers(model: Any) -> dict[int, Any]:
    """vLLM's attention layers with 8-bit keys and values, by the number of the decoder layer."""
    from vllm.model_executor.layers.attention import Attention

    named = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    found = {re.search(r"\blayers\.(\d+)\.", name): module for name, module in named.items()}
    return {int(match[1]): module for match, module in found.items() if match and _in_8_bits(module)}


def _in_8_bits(layer: Any) -> bool:
    return layer.kv_cache_dtype in ("fp8", "fp8_e4m3")


def set_scales_(layers: Mapping[int, Any], scales: Mapping[int, KVScales]) -> int:
    """Overwrite the scales of each layer in place; returns how many layers have them.

    Raises EngineError unless each layer gets scales, and for attention that would not read them.
    """
    if set(layers) != set(scales):
        raise EngineError(
            f"scales of keys and values are for {len(scales)} layers, and {len(layers)} have 8-bit ones: write "
            "rollout.kv_cache_dtype: fp8_per_token_head, or auto"
        )
    for layer in layers.values():
        names = {kind.__name__ for kind in type(layer.impl).__mro__}
        if names.isdisjoint(READ_ON_THE_CARD):
            raise EngineError(
                f"vLLM attends by {type(layer.impl).__name__}, whose scales of keys and values cannot change: write "
                "rollout.kv_cache_dtype: fp8_per_token_head, or auto"
            )
    for number, layer in layers.items():
        _set_(layer, scales[number])
    return len(layers)


def _set_(layer: Any, scales: KVScales) -> None:
    values = {"k": scales.key, "v": scales.value}
    if getattr(layer, "query_quant", None) is not None:  # otherwise queries are not rounded
        values["q"] = scales.query
    for letter, value in values.items():
        getattr(layer, f"_{letter}_scale").data.fill_(value)  # vLLM 0.25.1 leaves scales that require a gradient
        setattr(layer, f"_{letter}_scale_float", value)
        on_host = getattr(layer, f"_{letter}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(value)
