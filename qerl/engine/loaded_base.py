"""A base that is loaded for training alone: no engine samples from it.

On a card from Ampere on NVFP4 linears are packed into the layout of our own kernels as they are loaded, one fused group
after another, so that the trainer decodes them as fast as it does beside vLLM. Elsewhere they are decoded from the
checkpoint's own layout, by plain torch: exact as well, and slower.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from qerl import formats
from qerl.base.errors import EngineError
from qerl.checkpoint.activations import check_placed, read_activations
from qerl.checkpoint.adapter import base_linears, load_start_
from qerl.checkpoint.experts import FUSED
from qerl.checkpoint.load import load_model, local_folder
from qerl.engine.memory import Cap
from qerl.engine.update import AdapterUpdate, Update, write_update_
from qerl.formats.linear import PackedLinear
from qerl.formats.nvfp4.kernel_layout import place_in_kernel_layout_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.engine.options import EngineOptions

logger = logging.getLogger(__name__)


class LoadedBase:
    """The part of `qerl.engine.interface.Engine` that training asks for."""

    name = "none"

    def __init__(self, base: str, format: str, options: EngineOptions) -> None:
        """Load the weights at `base`: on the card if there is one, else on the CPU."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            Cap(torch.cuda.current_device(), options.cap_gib)
        folder = local_folder(base, options.trust_remote_code)
        self._model: PreTrainedModel | None = load_model(base, format, options.dtype, device, options.trust_remote_code)
        expected = read_activations(folder, formats.get(format))
        rounded = check_placed(base_linears(self._model), expected) if expected else ""
        placed = place_in_kernel_layout_(self._model, FUSED) if device == "cuda" else 0
        if options.start is not None:
            load_start_(self._model, options.start)
        if device == "cuda" and formats.get(format).product_of_vllm:
            _bring_product_of_vllm()
        packed = any(isinstance(module, PackedLinear) for module in self._model.modules())
        self.kernel = "qerl" if placed else f"{'unpack + ' if packed else ''}torch {self._model.dtype}"
        self.kernel += f" on {self._model.device}{rounded}"

    def policy_model(self) -> PreTrainedModel:
        """The model, frozen."""
        if self._model is None:
            raise EngineError("this base was closed: load it again")
        return self._model

    def sync(self, update: Update) -> int:
        """Pack an update of whole weights into the model; an adapter acts on it as it is. Returns the tensors taken."""
        if isinstance(update, AdapterUpdate):
            return len(update)
        taken = write_update_(self.policy_model(), update)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a product may read its weight before the launch ahead of it has ended
        return taken

    def sleep(self) -> None:
        """There is nothing that could be given back between steps."""

    def close(self) -> None:
        """Give the card's memory back once the caller has dropped the model."""
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _bring_product_of_vllm() -> None:
    """Register the product of this card, which is vLLM's; no engine is opened for it."""
    if find_spec("vllm") is None:
        logger.warning("vLLM is not installed, so FP8 products run in plain torch, several times slower")
        return
    import qerl.engine.vllm.flash
    import qerl.engine.vllm.fp8  # noqa: F401
