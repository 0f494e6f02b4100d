"""What is trained: an adapter on a frozen base, an adapter that is packed into it, or whole weights.

A run asks its policy for the parameters that the optimizer updates, for what a sync sends to the engine, for its files
in a checkpoint, and for the policy that a KL term compares with. Nothing else needs to know which kind it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter import (
    A_SUFFIX,
    B_SUFFIX,
    adapter_scaling,
    adapter_tensors,
    base_linears,
    load_tensors_,
    pack_in_,
    reference_adapter,
    reference_tensors,
    save_adapter,
)
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.folder import WEIGHTS
from qerl.checkpoint.output import write_weights
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.checkpoint.source import by_layer
from qerl.engine.update import AdapterUpdate, Update, WeightsUpdate, pack_weights_
from qerl.formats.base import TensorSpec
from qerl.formats.linear import PackedLinear
from qerl.model.master import LowRankSum, set_master_
from qerl.plan.trained import ADAPTER_WORK

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from training.policy.shards import Shards


DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}  # of masters, as safetensors names them


class AdapterPolicy:
    """A LoRA adapter, and perhaps norms, on a frozen base."""

    trained_bytes = ADAPTER_WORK  # per trained parameter, beside it: gradient, optimizer state, copies
    shards = None  # of several ranks that share the parameters out

    def __init__(self, model: PeftModel) -> None:
        self.model = model  # what the trainer is given: its parameters that require a gradient are trained
        self.base_model: PreTrainedModel = model.get_base_model()  # over the engine's weights

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters; of a policy that ranks share out, this rank's."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    replicas = parameters  # those that every rank has and updates by the same gradient

    def update(self) -> Update:
        """What a sync sends: the parameters as they are now, not copied."""
        return AdapterUpdate(adapter_tensors(self.model), adapter_scaling(self.model))

    def save(self, folder: Path) -> None:
        """Write the parameters into an existing folder."""
        save_adapter(self.model, folder)

    def load(self, folder: Path) -> int:
        """Copy saved parameters into those in training; returns the number of tensors. Raises QerlError if they do not
        fit."""
        tensors, scaling = read_adapter(folder)
        count = load_tensors_(self.model, tensors)
        if not math.isclose(scaling, own := adapter_scaling(self.model)):
            raise ConfigError(
                f"{folder} was trained with alpha / rank {scaling:g} and would act with {own:g}: write the "
                "adapter.alpha that was there in the run's config.yaml, or start a new run with this one as --model"
            )
        return count

    def reference(self) -> AbstractContextManager[None] | None:
        """Within it the model is the policy that the run began with; None if that was not kept."""
        return reference_adapter(self.model)


class WeightsPolicy:
    """Whole weights: masters of linears and norms. A sync packs the linears' masters; norms act as they are.

    A linear's master gets the gradient of its packed weight (`qerl.model.master`). Of several ranks each has the
    masters of some layers (`shards`) and an empty parameter for every other one; all have the norms.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Iterable[tuple[str, torch.Tensor]],
        norms: Iterable[str] = (),
        dtype: torch.dtype | None = None,
        trained_bytes: float = 12.0,
        shards: Shards | None = None,
    ) -> None:
        """`weights` (out, in) by module name are where training starts; they are copied, to `dtype` (float32 if None).
        Those of other ranks may be empty. `norms` are trained from their present weights, in float32."""
        self.model = self.base_model = model
        self.trained_bytes, self.shards = trained_bytes, shards
        modules = dict(model.named_modules())
        self._weights = {name: _set_linear_(modules[name], weight, dtype) for name, weight in weights}
        self._norms = {name: _set_norm_(modules[name]) for name in norms}
        if shards is not None:
            shards.receive_gradients_(self._weights)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([*self._own().values(), *self._norms.values()])

    def replicas(self) -> Iterator[nn.Parameter]:
        return self.parameters() if self.shards is None else iter(self._norms.values())

    def update(self) -> WeightsUpdate:
        return WeightsUpdate(self._own(), self._norms)

    def save(self, folder: Path) -> None:
        """Of several ranks the first writes, while the others `shards.serve` what `answer` finds."""
        (Path(folder) / WEIGHTS).mkdir()
        names = [f"{name}.weight" for name in (*self._weights, *self._norms)]
        write_weights(Path(folder) / WEIGHTS, ({name: self._read(name) for name in names} for names in by_layer(names)))

    def answer(self, name: str) -> dict[str, torch.Tensor] | None:
        """What this rank has of a checkpoint's tensor."""
        tensor = self._named().get(name)
        return None if tensor is None else {name: tensor}

    def load(self, folder: Path) -> int:
        place, own = Path(folder) / WEIGHTS, self._named()
        saved = read_tensors(place)
        specs = {name: TensorSpec(DTYPES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in own.items()}
        specs |= {
            f"{name}.weight": TensorSpec(DTYPES[str(master.dtype)], self.shards.shape(name))
            for name, master in self._weights.items()
            if f"{name}.weight" not in specs
        }
        found = {name: TensorSpec(info.dtype, info.shape) for name, info in saved.items()}
        if wrong := sorted(name for name in {*specs, *found} if specs.get(name) != found.get(name)):
            raise CheckpointError(f"{place} does not fit what is trained: {wrong[:4]} are of another kind or missing")
        with TensorReader(saved) as read, torch.no_grad():
            for name, master in own.items():
                master.copy_(read(name))
        return len(own)

    def reference(self) -> None:
        """The masters are the only copy."""

    def _own(self) -> dict[str, nn.Parameter]:
        """The masters of linears that this rank has."""
        return {n: master for n, master in self._weights.items() if self.shards is None or self.shards.mine(n)}

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": master.detach() for name, master in {**self._own(), **self._norms}.items()}

    def _read(self, name: str) -> torch.Tensor:
        """A checkpoint's tensor on the CPU, from the rank that has it."""
        own = self._named().get(name)
        return self.shards.ask(name, self.answer)[name] if own is None else own.cpu()


def _set_linear_(linear: nn.Linear, weight: torch.Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    device = linear.weight_device if isinstance(linear, PackedLinear) else linear.weight.device
    return set_master_(linear, weight.detach().to(device, dtype or torch.float32, copy=True))


def _set_norm_(norm: nn.Module) -> nn.Parameter:
    norm.weight = torch.nn.Parameter(norm.weight.detach().to(torch.float32, copy=True))
    return norm.weight


def check_reference(policy: Policy, kl_coef: float) -> None:
    """Raise ConfigError for a KL term without a policy to compare with."""
    if kl_coef and policy.reference() is None:
        raise ConfigError(
            f"loss.kl_coef: {kl_coef:g} compares with the policy that the run starts with, which a run that trains "
            "whole weights does not keep: write loss.kl_coef: 0"
        )


class PackedInPolicy(AdapterPolicy):
    """A LoRA adapter that is trained through the quantizer: each sync packs Q(W0 + s B A) into the engine's weights.

    W0 are the 16-bit weights that the run started from, which never change; from packed ones an update of less than
    half a step between two codes would vanish. Engine and trainer multiply by the packed weights alone, and A and B
    receive the gradients of the packed weight as if rounding were the identity (`qerl.model.lora`).
    """

    def __init__(self, model: PeftModel, start: Mapping[str, torch.Tensor]) -> None:
        """`start` has W0 (out, in) of each adapted linear by its module name, on the card or in host memory."""
        super().__init__(model)
        self._start = start
        pack_in_(model)

    def update(self) -> WeightsUpdate:
        """The sums, which are computed while they are packed, and trained norms."""
        tensors = adapter_tensors(self.model)
        norms = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".lora_" not in name}
        return WeightsUpdate(self._sums(tensors), norms)

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


Policy = AdapterPolicy | WeightsPolicy
