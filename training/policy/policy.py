"""What is trained: an adapter on a frozen base, or whole weights.

A run asks its policy for the parameters that the optimizer updates, for what a sync sends to the engine, for its files
in a checkpoint, and for the policy that a KL term compares with. Nothing else needs to know which kind it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import TensorSpec, read_tensors
from qerl.checkpoint.source import by_layer
from qerl.checkpoint.weights_run import WEIGHTS
from qerl.checkpoint.writer import write_weights
from qerl.engine.update import AdapterUpdate, Update, WeightsUpdate
from qerl.errors import CheckpointError, ConfigError
from qerl.plan.trained import ADAPTER_WORK

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}  # of masters, as safetensors names them


class Policy(Protocol):
    """See the module docstring."""

    model: nn.Module  # what the trainer is given: its parameters that require a gradient are trained
    base_model: PreTrainedModel  # the transformers model in it, over the engine's weights
    trained_bytes: float  # per trained parameter, what training needs beside it: gradient, optimizer state, copies

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

    trained_bytes = ADAPTER_WORK

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
    """Whole weights: masters of linears and norms. A sync packs those of linears into the model; norms act as they are.

    The gradient of a linear's master is that of its packed weight (`qerl.layers.master`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Iterable[tuple[str, torch.Tensor]],
        norms: Iterable[str] = (),
        dtype: torch.dtype | None = None,
        trained_bytes: float = 12.0,
    ) -> None:
        """`weights` (out, in) by module name are where training starts; they are copied, to `dtype` (float32 if None).
        `norms` are trained from their present weights, in float32."""
        self.model = self.base_model = model
        self.trained_bytes = trained_bytes
        modules = dict(model.named_modules())
        self._weights = {name: _set_linear_(modules[name], weight, dtype) for name, weight in weights}
        self._norms = {name: _set_norm_(modules[name]) for name in norms}

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([*self._weights.values(), *self._norms.values()])

    def update(self) -> WeightsUpdate:
        return WeightsUpdate(self._weights, self._norms)

    def save(self, folder: Path) -> None:
        named = self._named()
        (Path(folder) / WEIGHTS).mkdir()
        write_weights(
            Path(folder) / WEIGHTS, ({name: named[name].cpu() for name in names} for names in by_layer(named))
        )

    def load(self, folder: Path) -> int:
        import torch

        place, own = Path(folder) / WEIGHTS, self._named()
        saved = read_tensors(place)
        specs = {name: TensorSpec(DTYPES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in own.items()}
        found = {name: TensorSpec(info.dtype, info.shape) for name, info in saved.items()}
        if wrong := sorted(name for name in {*specs, *found} if specs.get(name) != found.get(name)):
            raise CheckpointError(f"{place} does not fit what is trained: {wrong[:4]} are of another kind or missing")
        with TensorReader(saved) as read, torch.no_grad():
            for name, master in own.items():
                master.copy_(read(name))
        return len(own)

    def reference(self) -> None:
        """The masters are the only copy."""

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": master.detach() for name, master in {**self._weights, **self._norms}.items()}


def _set_linear_(linear: nn.Linear, weight: torch.Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    import torch

    from qerl.formats.linear import PackedLinear
    from qerl.layers.master import set_master_

    device = linear.weight_device if isinstance(linear, PackedLinear) else linear.weight.device
    return set_master_(linear, weight.detach().to(device, dtype or torch.float32, copy=True))


def _set_norm_(norm: nn.Module) -> nn.Parameter:
    import torch

    norm.weight = torch.nn.Parameter(norm.weight.detach().to(torch.float32, copy=True))
    return norm.weight


def check_reference(policy: Policy, kl_coef: float) -> None:
    """Raise ConfigError for a KL term without a policy to compare with."""
    if kl_coef and policy.reference() is None:
        raise ConfigError(
            f"loss.kl_coef: {kl_coef:g} compares with the policy that the run starts with, which a run that trains "
            "whole weights does not keep: write loss.kl_coef: 0"
        )
