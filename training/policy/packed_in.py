"""A LoRA adapter that is trained through the quantizer: each sync packs Q(W0 + s B A) into the engine's weights.

W0 are the 16-bit weights that the run started from, which never change; from packed ones an update of less than half a
step between two codes would vanish. Engine and trainer multiply by the packed weights alone, and A and B receive the
gradients of the packed weight as if rounding were the identity (`qerl.model.lora`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.checkpoint.adapter import (
    A_SUFFIX,
    B_SUFFIX,
    adapter_scaling,
    adapter_tensors,
    base_linears,
    pack_in_,
    reference_adapter,
    reference_tensors,
)
from qerl.engine.update import WeightsUpdate, pack_weights_
from qerl.model.low_rank import LowRankSum

if TYPE_CHECKING:
    from torch import nn

    from training.policy.policy import AdapterPolicy


class PackedInPolicy:
    """See the module docstring. Parameters and files are those of the adapter, an `AdapterPolicy`."""

    shards = None

    def __init__(self, adapter: AdapterPolicy, start: Mapping[str, torch.Tensor]) -> None:
        """`start` has W0 (out, in) of each adapted linear by its module name, on the card or in host memory."""
        self.model, self.base_model, self._adapter, self._start = adapter.model, adapter.base_model, adapter, start
        self.trained_bytes = adapter.trained_bytes
        pack_in_(self.model)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._adapter.parameters()

    replicas = parameters

    def update(self) -> WeightsUpdate:
        """The sums, which are computed while they are packed, and trained norms."""
        tensors = adapter_tensors(self.model)
        norms = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".lora_" not in name}
        return WeightsUpdate(self._sums(tensors), norms)

    def save(self, folder: Path) -> None:
        self._adapter.save(folder)

    def load(self, folder: Path) -> int:
        return self._adapter.load(folder)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the weights are packed anew, with the adapter that the run began with or, if it was new, without.

        Afterwards they have the same bits as before, since packing depends on nothing else. The engine, which reads
        the same tensors, has to wait.
        """
        self._pack_(reference_tensors(self.model))
        try:
            with reference_adapter(self.model):
                yield
        finally:
            self._pack_(adapter_tensors(self.model))

    def _sums(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRankSum]:
        scaling = adapter_scaling(self.model)
        return {
            name: LowRankSum(start, tensors[name + A_SUFFIX], tensors[name + B_SUFFIX], scaling)
            for name, start in self._start.items()
        }

    def _pack_(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pack_weights_(self._sums(tensors), base_linears(self.base_model))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a product may read its weight before the launch ahead of it has ended
