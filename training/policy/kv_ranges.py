"""Calibration of keys and values in 8 bits: the largest ones of each layer on a run's own prompts, and their scales.

They are measured in the trainer's model, whose weights and adapter are those that the engine samples with. The trainer
then rounds its keys and values by the same scales as the engine, so that both compute the same policy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.base.parallel import ALONE, Parallel
from qerl.formats.fp8.kv import KVScales, Ranges, scales_of
from qerl.model.packed_attention import attending_by, set_kv_scales_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.engine.interface import Engine

NAME = "qerl_ranges"
ROWS, LENGTH = 16, 1024  # prompts that are measured, and tokens of each
KV_REFRESH = 10  # steps between calibrations
FILE = "kv_scales.json"  # of a checkpoint


class KVCalibration:
    """Calibrates the keys and values of a policy and of its engine, again every `refresh` steps.

    All ranks take the scales that the first one found.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], refresh: int, parallel: Parallel = ALONE
    ) -> None:
        self._model, self._rows, self._refresh = model, [list(ids[:LENGTH]) for ids in prompts[:ROWS]], refresh
        self._parallel = parallel
        self._step: int | None = None  # of the last calibration
        self._sent: dict[int, KVScales] | None = None  # which policy and engine have
        self.scales: dict[int, KVScales] = {}

    def after_sync(self, engine: Engine, step: int) -> bool:
        """Calibrate both before the rollout of `step` if that is due; returns whether a scale has changed."""
        if self._step is None or step - self._step >= self._refresh:
            found = scales_of(measured(self._model, self._rows)) if self._parallel.first else {}
            self.scales, self._step = self._parallel.broadcast(found), step
        if self.scales == self._sent:
            return False
        set_kv_scales_(self._model, self.scales)
        engine.set_kv_scales(self.scales)
        self._sent = self.scales
        return True

    def save(self, folder: Path) -> None:
        """Write the scales into a checkpoint, so that a run that goes on from it samples by the same ones."""
        state = {"step": self._step, "scales": {layer: asdict(one) for layer, one in self.scales.items()}}
        (folder / FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Without it, as in checkpoints of earlier versions, the next sync calibrates."""
        if (folder / FILE).is_file():
            saved = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self._step = saved["step"]
            self.scales = {int(layer): KVScales(**one) for layer, one in saved["scales"].items()}


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
    with attending_by(NAME, config):
        yield
