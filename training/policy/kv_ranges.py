"""The largest queries, keys and values of each layer, on a run's own prompts: what 8-bit caches are calibrated on.

They are measured in the trainer's model, whose weights and adapter are those that the engine samples with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.engine.kv_scales import KVScales, Ranges, scales_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.engine.interface import Engine

NAME = "qerl_ranges"
ROWS, LENGTH = 16, 1024  # prompts that are measured, and tokens of each


class KVCalibration:
    """Calibrates an engine's keys and values at its first sync, and again after each `refresh` syncs."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], refresh: int) -> None:
        self._model, self._rows, self._refresh = model, [list(ids[:LENGTH]) for ids in prompts[:ROWS]], refresh
        self._syncs = 0
        self.scales: dict[int, KVScales] = {}

    def after_sync(self, engine: Engine) -> bool:
        """Calibrate `engine` if that is due; returns whether a scale has changed."""
        due, self._syncs = self._syncs % self._refresh == 0, self._syncs + 1
        if not due or (found := scales_of(measured(self._model, self._rows))) == self.scales:
            return False
        engine.set_kv_scales(found)
        self.scales = found
        return True


def measured(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> dict[int, Ranges]:
    """The ranges of each layer of `model`, by its number, over `rows` of token ids."""
    seen: dict[int, torch.Tensor] = {}
    training, device = model.training, model.device
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and model.dtype == torch.bfloat16)
    with torch.no_grad(), bf16, _recording(model, seen):
        model.eval()
        for ids in rows:
            model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False, logits_to_keep=1)
        model.train(training)
    return {layer: Ranges(*values.tolist()) for layer, values in seen.items()}


@contextmanager
def _recording(model: PreTrainedModel, seen: dict[int, torch.Tensor]) -> Iterator[None]:
    """Within it, attention adds to `seen` the largest magnitudes (3,) of its layer."""
    config = model.config.get_text_config()
    before = config._attn_implementation

    def attend(module: torch.nn.Module, *given: torch.Tensor, **named: Any) -> tuple[torch.Tensor, Any]:
        largest = torch.stack([tensor.abs().amax().float() for tensor in given[:3]])
        known = seen.get(module.layer_idx)
        seen[module.layer_idx] = largest if known is None else torch.maximum(known, largest)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa" if before == NAME else before, eager)
        return own(module, *given, **named)

    AttentionInterface.register(NAME, attend)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
