"""Find a model's block norms by their structure, and add noise to them in float32 without touching their weights.

A block norm is an RMSNorm that is a direct child of a decoder layer (`model.layers.3.input_layernorm`). Noise is for
those whose output the next linears read: where a layer also norms what attention and MLP give (Gemma 3 and 4), before
it is added to the stream, those norms stay clean. Norms inside attention (QK-norms) and the final norm are not block
norms. Class names play no part: each candidate is called once to check that it computes gain * x / sqrt(mean(x^2) +
eps), where the gain is its weight or, as in Qwen3.5 and Gemma 3, 1 + weight.

The noisy norm computes (weight + noise) * x_hat in float32 and rounds once, because a sum stored in bfloat16 would
swallow noise below 1e-3. The model gets nothing but an instance attribute `forward`, so deleting that attribute
restores the clean norm exactly.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn

_DIRECT_CHILD = re.compile(r"(^|\.)layers\.\d+\.[^.]+$")
_WRAPPERS = re.compile(r"(^base_model\.model\.)|(\.modules_to_save\.default$)")
_OFFSETS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()  # of the norms that were checked


def block_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Block norms by base module name, in the model's order.

    Raises EngineError if there are none, or if one computes another formula. Each is checked once.
    """
    norms = {}
    for name, module in model.named_modules():
        base_name = _WRAPPERS.sub("", name)
        if _DIRECT_CHILD.search(base_name) and _looks_like_norm(module):
            norms[base_name] = module  # for a trained norm the last one is PEFT's copy (modules_to_save), which runs
    if not norms:
        raise EngineError(
            "no RMSNorm was found among the decoder layers' children, so noise would change nothing: "
            "set noise.enabled=false for this architecture"
        )
    for name, module in norms.items():
        _offset(name, module)
    return norms


def noise_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The block norms that noise is added to, as `block_norms` gives them."""
    norms = block_norms(model)
    before = {name.rpartition(".")[0] for name in norms if name.endswith(".pre_feedforward_layernorm")}
    return {n: norm for n, norm in norms.items() if n.rpartition(".")[0] not in before or ".post_" not in n}


def set_norm_noise_(norms: Mapping[str, nn.Module], noise: Mapping[str, torch.Tensor] | None) -> int:
    """Add `noise`, one float32 (d,) per name, to the norms from now on; None removes it. Returns how many are noisy.

    Raises EngineError if a name is not among `norms` or a shape differs from the norm's weight.
    """
    for module in norms.values():
        module.__dict__.pop("forward", None)
    if noise is None:
        return 0
    if unknown := sorted(set(noise) - set(norms)):
        raise EngineError(f"noise was given for norms that the model does not have: {unknown[:4]}")
    for name, vector in noise.items():
        module = norms[name]
        if vector.shape != module.weight.shape:
            raise EngineError(f"noise for {name} has shape {tuple(vector.shape)}, not {tuple(module.weight.shape)}")
        added = vector.to(module.weight.device) + _offset(name, module)
        module.forward = types.MethodType(_noisy_forward(added), module)
    return len(noise)


def _noisy_forward(added: torch.Tensor):
    from qerl.model.elementwise import RMSNorm, rms_norm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype_of(hidden_states) if isinstance(self, RMSNorm) else None
        return rms_norm(hidden_states, self.weight.float() + added, _eps(self), dtype)

    return forward


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _looks_like_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return (
        not any(True for _ in module.children())
        and set(parameters) == {"weight"}
        and parameters["weight"].dim() == 1
        and isinstance(_eps(module), float)
    )


def _offset(name: str, module: nn.Module) -> float:
    """What a norm's gain is more than its weight: 0 or 1. Raises EngineError for another formula."""
    if module.weight.is_meta:
        return 0.0
    if module not in _OFFSETS:
        _OFFSETS[module] = _found_offset(name, module)
    return _OFFSETS[module]


def _found_offset(name: str, module: nn.Module) -> float:
    import torch

    weight = module.weight
    with torch.no_grad():
        x = torch.linspace(-1.5, 2.0, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
        out = type(module).forward(module, x)
        wide = x.float()
        hat = wide * (wide.pow(2).mean(-1, keepdim=True) + _eps(module)).rsqrt()
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2  # by the output: a trained weight may be wider than it
    for offset in (0.0, 1.0):
        if torch.allclose(out.float(), (weight.float() + offset) * hat, rtol=tolerance, atol=tolerance):
            return offset
    raise EngineError(
        f"{name} ({type(module).__name__}) is neither weight * x / sqrt(mean(x^2) + eps) nor (1 + weight) * the same: "
        "noise is defined for these norms only; set noise.enabled=false for this architecture"
    )
