"""The norm weights that act in the engine: the checkpoint's or trained ones, with the noise on top, in float32.

They lie in the `gain` buffers of the norms (`norm.py`), which captured graphs read, and are always written from the
clean weights: noise that is taken away leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qerl.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn


class Gains:
    """Of `norms`, by module name: `weight` is the checkpoint's and stays as it is, `gain` is what acts."""

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        self.norms = dict(norms)
        self._trained: dict[str, torch.Tensor] = {}
        self._noise: dict[str, torch.Tensor] = {}

    def set_trained_(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Let these weights, as they are now, act where they are given, the checkpoint's elsewhere; the noise stays."""
        import torch

        self._trained = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in trained.items()}
        self._write_()

    def set_noise_(self, noise: Mapping[str, torch.Tensor]) -> None:
        """Add a vector to each norm that is named, nothing to others. Raises EngineError for what does not fit."""
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
