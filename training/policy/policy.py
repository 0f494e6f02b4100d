"""What is trained: an adapter on a frozen base, or whole weights.

A run asks its policy for the parameters that the optimizer updates, for what a sync sends to the engine, for its files
in a checkpoint, and for the policy that a KL term compares with. Nothing else needs to know which kind it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qerl.checkpoint.adapter import (
    adapter_scaling,
    adapter_tensors,
    load_tensors_,
    read_adapter,
    reference_adapter,
    save_adapter,
)
from qerl.engine.update import AdapterUpdate, Update, WeightsUpdate
from qerl.errors import CheckpointError, ConfigError
from qerl.files.disk import mode_by_umask

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

WEIGHTS_FILE = "weights.safetensors"


class Policy(Protocol):
    """See the module docstring."""

    model: nn.Module  # what the trainer is given: its parameters that require a gradient are trained
    base_model: PreTrainedModel  # the transformers model in it, over the engine's weights

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters."""

    def update(self) -> Update:
        """What a sync sends: the parameters as they are now, not copied."""

    def save(self, folder: Path) -> None:
        """Write the parameters into an existing folder."""

    def load(self, folder: Path) -> int:
        """Copy saved parameters into those in training; returns the number of tensors. Raises QerlError if they do not
        fit."""

    def reference(self) -> AbstractContextManager[None] | None:
        """Within it the model is the policy that the run began with; None if that was not kept."""


class AdapterPolicy:
    """A LoRA adapter, and perhaps norms, on a frozen base."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.base_model: PreTrainedModel = model.get_base_model()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def update(self) -> AdapterUpdate:
        return AdapterUpdate(adapter_tensors(self.model), adapter_scaling(self.model))

    def save(self, folder: Path) -> None:
        save_adapter(self.model, folder)

    def load(self, folder: Path) -> int:
        tensors, scaling = read_adapter(folder)
        count = load_tensors_(self.model, tensors)
        if not math.isclose(scaling, own := adapter_scaling(self.model)):
            raise ConfigError(
                f"{folder} was trained with alpha / rank {scaling:g} and would act with {own:g}: write the "
                "adapter.alpha that was there in the run's config.yaml, or start a new run with this one as --model"
            )
        return count

    def reference(self) -> AbstractContextManager[None]:
        return reference_adapter(self.model)


class WeightsPolicy:
    """Whole weights: float32 masters of linears and norms, which the engine packs into the model at each sync.

    This is what a run reads and writes of them. A forward pass whose gradient reaches the masters is not part of it.
    """

    def __init__(
        self, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]
    ) -> None:
        """`weights` (out, in) and `norms` (d,) by module name are where training starts; they are copied."""
        self.model = self.base_model = model
        self._weights, self._norms = _masters(weights), _masters(norms)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([*self._weights.values(), *self._norms.values()])

    def update(self) -> WeightsUpdate:
        return WeightsUpdate(self._weights, self._norms)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._named(), Path(folder) / WEIGHTS_FILE)
        mode_by_umask(Path(folder) / WEIGHTS_FILE)

    def load(self, folder: Path) -> int:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file, own = Path(folder) / WEIGHTS_FILE, self._named()
        try:
            saved = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): take another checkpoint") from error
        wrong = sorted(set(own) ^ set(saved)) or [name for name in own if own[name].shape != saved[name].shape]
        if wrong:
            raise CheckpointError(f"{file} does not fit what is trained: {wrong[:4]} are of other shapes or missing")
        with torch.no_grad():
            for name, master in own.items():
                master.copy_(saved[name])
        return len(own)

    def reference(self) -> None:
        """The masters are the only copy."""

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": master.detach() for name, master in {**self._weights, **self._norms}.items()}


def _masters(tensors: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    import torch

    return {name: torch.nn.Parameter(tensor.detach().to(torch.float32, copy=True)) for name, tensor in tensors.items()}


def check_reference(policy: Policy, kl_coef: float) -> None:
    """Raise ConfigError for a KL term without a policy to compare with."""
    if kl_coef and policy.reference() is None:
        raise ConfigError(
            f"loss.kl_coef: {kl_coef:g} compares with the policy that the run starts with, which a run that trains "
            "whole weights does not keep: write loss.kl_coef: 0"
        )
