"""Put our layers into a transformers model: norms are replaced; layers, attention and MLPs get another forward."""

from __future__ import annotations

import types

from torch import nn

from qerl.model.attention import attention_forward
from qerl.model.decoder import layer_forward
from qerl.model.elementwise import RMSNorm
from qerl.model.mlp import mlp_forward

PARTS = ("RMSNorm", "DecoderLayer", "Attention", "MLP")
FAMILIES = {  # our forwards follow those of transformers 5.17
    **dict.fromkeys(("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral"), PARTS),
    "Olmoe": ("RMSNorm", "DecoderLayer"),  # its attention norms all heads of q and k at once
}


def fuse_(model: nn.Module) -> int:
    """Change the modules of a known family in `model`; weights are shared and names stay. Returns how many changed.

    Call it before an adapter is attached. A model of any other family is left as it is.
    """
    changed = 0
    for name, module in list(model.named_modules()):
        kind = _kind(module)
        if kind == "RMSNorm":
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, RMSNorm(module.weight, module.variance_epsilon))
        elif kind == "DecoderLayer":
            module.forward = types.MethodType(layer_forward, module)
        elif kind == "Attention":
            module.forward = types.MethodType(attention_forward, module)
        elif kind == "MLP" and module.config.hidden_act in ("silu", "swish"):
            module.forward = types.MethodType(mlp_forward, module)
        else:
            continue
        changed += 1
    return changed


def _kind(module: nn.Module) -> str | None:
    cls = type(module)
    if not cls.__module__.startswith("transformers.models."):
        return None
    for family, parts in FAMILIES.items():
        if cls.__name__ in tuple(f"{family}{part}" for part in parts):
            return cls.__name__.removeprefix(family)
    return None
