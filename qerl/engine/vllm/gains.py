"""The norm weights that act in the engine, in float32: the checkpoint's or the trained ones, plus the noise.

They are in the `gain` buffers of the norms (`norm.py`), which captured graphs read. They are always computed from the
clean weights, so noise leaves no trace when it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn


class Gains:
    """The gains of `norms`, by module name. A norm's `weight` is the checkpoint's and never changes; `gain` acts."""

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        self.norms = dict(norms)
        self._trained: dict[str, torch.Tensor] = {}
        self._noise: dict[str, torch.Tensor] = {}

    def set_trained_(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Have copies of these weights act, and the checkpoint's in all other norms. The noise stays."""
        import torch

        self._trained = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in trained.items()}
        self._write_()

    def set_noise_(self, noise: Mapping[str, torch.Tensor]) -> None:
        """Add these vectors to the named norms and nothing to the others. Raises EngineError if one does not fit."""
        if unknown := sorted(set(noise) - set(self.norms)):
            raise EngineError(f"noise was given for norms that the model does not have: {unknown[:4]}")
        for name, vector in noise.items():
            if vector.shape != self.norms[name].gain.shape:
                raise EngineError(
                    f"noise for {name} has shape {tuple(vector.shape)}, not {tuple(self.norms[name].gain.shape)}"
                )
        self._noise = dict(noise)
        self._write_()

    def _write_(self) -> None:
        for name, norm in self.norms.items():
            clean = self._trained.get(name)
            norm.gain.copy_(norm.weight.data if clean is None else clean)
            if name in self._noise:
                norm.gain.add_(self._noise[name].to(norm.gain))
