"""LoRA adapters: attach one to a model, name its tensors, write the standard PEFT folder (`adapter_file` reads it).

No other module imports peft. Tensors are named by the base model's modules, without PEFT's prefixes, so that those of
every engine and every file can be compared with the base:

    model.layers.0.self_attn.q_proj.lora_A.weight    (rank, in_features)
    model.layers.0.self_attn.q_proj.lora_B.weight    (out_features, rank)
    model.layers.0.input_layernorm.weight            (hidden,), only where norms are trained

`qerl.checkpoint.expert_adapter` adds those on the experts of a mixture of experts.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.bounded import JSON_BYTES, parse_json, read_text
from qerl.base.disk import mode_by_umask, replace_text
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter_file import ADAPTER_FILES, PEFT_PREFIX
from qerl.checkpoint.expert_adapter import (
    adapters_of,
    attach_to_experts_,
    config_of_file,
    describe,
    expert_tensors,
    is_of_experts,
    to_peft,
)
from qerl.checkpoint.linears import PROJECTIONS

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn

ADAPTER_NAME, REFERENCE = "default", "ref"


def attach_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] = PROJECTIONS,
    dropout: float = 0.0,
    train_norms: bool = False,
) -> PeftModel:
    """Wrap `model` with a fresh LoRA adapter in float32: A random, B zero, so that the model is unchanged.

    Raises ConfigError if a target matches no linear.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if missing := [target for target in targets if target not in leaves]:
        raise ConfigError(
            f"adapter.targets: {', '.join(missing)} match no linear of this model: write some of "
            f"{', '.join(sorted(leaves))}"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        modules_to_save=_norm_leaves(model) if train_norms else None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module(_fused_lora())
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    set_dtype_(peft_model, torch.float32)
    if train_norms:
        _let_wrappers_say_what_acts_(peft_model)
    return peft_model


def set_dtype_(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert what is trained to `dtype`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def adapter_tensors(model: nn.Module, adapter: str = ADAPTER_NAME) -> dict[str, torch.Tensor]:
    """The adapter's tensors by base module name (see the module docstring); these are the model's own, not copies."""
    tensors = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix(PEFT_PREFIX)
        for mark, clean in ((f".lora_A.{adapter}.", ".lora_A."), (f".lora_B.{adapter}.", ".lora_B.")):
            if mark in plain:
                tensors[plain.replace(mark, clean)] = parameter
        if (mark := f".modules_to_save.{adapter}.") in plain:
            tensors[plain.replace(mark, ".")] = parameter
    return tensors | expert_tensors(model) if adapter == ADAPTER_NAME else tensors


def adapter_scaling(model: PeftModel) -> float:
    """alpha / rank of the attached adapter, by which B is multiplied."""
    config = model.peft_config[ADAPTER_NAME]
    return config.lora_alpha / config.r


def reference_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """The factors that act within `reference_adapter`, named as by `adapter_tensors`; B is zero where none does."""
    import torch

    if REFERENCE in model.peft_config:
        return adapter_tensors(model, REFERENCE)
    own = adapter_tensors(model)
    return {name: torch.zeros_like(t) if name.endswith(".lora_B.weight") else t for name, t in own.items()}


@contextmanager
def reference_adapter(model: PeftModel) -> Iterator[None]:
    """The policy that a KL term holds on to: the adapter as it was when the trainer took it, or none if it was new.

    TRL 1.16 keeps that copy under the name "ref" (GRPOTrainer.__init__).
    """
    with ExitStack() as stack:
        for adapter in adapters_of(model):
            stack.enter_context(adapter.reference_factors())
        if REFERENCE not in model.peft_config:
            stack.enter_context(model.disable_adapter())
        else:
            stack.callback(model.set_adapter, model.active_adapter)
            model.set_adapter(REFERENCE)
        yield


def keep_expert_reference_(model: nn.Module) -> None:
    """Let adapters on experts keep a reference, if TRL has made one of the other factors."""
    if REFERENCE in getattr(model, "peft_config", ()):
        for adapter in adapters_of(model):
            adapter.keep_reference()


def name_base_(model: PeftModel, base: str) -> None:
    """Let the folders that the adapter is saved to name `base` (folder or hub id) as their base model."""
    model.peft_config[ADAPTER_NAME].base_model_name_or_path = base


def save_adapter(model: PeftModel, folder: str | Path, base: str | None = None) -> None:
    """Write the adapter as a standard PEFT folder that names `base` as its base model; None keeps the name it has."""
    if base is not None:
        name_base_(model, base)
    of_experts = expert_tensors(model)
    own = {id(tensor) for tensor in of_experts.values()}
    rest = {name: t.detach() for name, t in model.state_dict(keep_vars=True).items() if id(t) not in own}
    # With a KL term TRL adds a frozen copy to the model, named "ref", which is not to be saved.
    model.save_pretrained(
        str(folder),
        safe_serialization=True,
        selected_adapters=[ADAPTER_NAME],
        save_embedding_layers=False,
        **({"state_dict": rest} if of_experts else {}),
    )
    if of_experts:
        _add_experts(Path(folder), of_experts, model)
    mode_by_umask(Path(folder) / ADAPTER_FILES[1])
    (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT writes an empty template of a model card


def _add_experts(folder: Path, tensors: Mapping[str, torch.Tensor], model: PeftModel) -> None:
    """Add the factors on experts to a folder that PEFT has written."""
    from safetensors.torch import load_file, save_file

    config = parse_json(read_text(folder / ADAPTER_FILES[0], JSON_BYTES))
    config |= config_of_file(tensors, config["r"], adapter_scaling(model))
    replace_text(folder / ADAPTER_FILES[0], json.dumps(config, indent=2, sort_keys=True))
    added = {f"{PEFT_PREFIX}{name}": tensor.detach().cpu() for name, tensor in to_peft(tensors).items()}
    save_file(load_file(folder / ADAPTER_FILES[1]) | added, folder / ADAPTER_FILES[1], metadata={"format": "pt"})


def load_tensors_(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> int:
    """Copy `tensors` into the attached adapter and return their number.

    Raises CheckpointError unless names and shapes are those of the adapter.
    """
    import torch

    own = adapter_tensors(model)
    if missing := sorted(set(own) ^ set(tensors)):
        raise CheckpointError(
            f"the adapter does not fit this model ({missing[:4]} stand on one side only): give the base that it was "
            "trained on"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the adapter's {name} has shape {tuple(tensors[name].shape)}, the model asks for "
                    f"{tuple(parameter.shape)}: it was trained on another base or rank"
                )
            parameter.copy_(tensors[name])
    return len(own)


def start_at_(model: nn.Module, start: Mapping[str, torch.Tensor]) -> None:
    """Let the attached fresh adapter start at factors A0 (r0, in) and B0 (out, r0), r0 at most its rank, scaling 1.

    Components above r0 stay as they are, with B zero; so do linears that `start` has nothing for, and factors of
    linears that have no adapter are not used. Raises CheckpointError for factors of another shape.
    """
    import torch

    own, scaling = adapter_tensors(model), adapter_scaling(model)
    with torch.no_grad():
        for name, tensor in start.items():
            if (parameter := own.get(name)) is None:
                continue
            is_a = name.endswith(".lora_A.weight")
            place = parameter[: tensor.shape[0]] if is_a else parameter[:, : tensor.shape[1]]
            if place.shape != tensor.shape:
                raise CheckpointError(
                    f"the start's {name} is {tuple(tensor.shape)} and the adapter's {tuple(parameter.shape)}: it is of "
                    "another base"
                )
            place.copy_(tensor if is_a else tensor.to(parameter.dtype) / scaling)


def set_scaling_(model: nn.Module, scaling: float) -> None:
    """Multiply B by `scaling` from now on in every linear of the attached adapter."""
    from peft.tuners.lora.layer import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling[ADAPTER_NAME] = scaling
    for adapter in adapters_of(model):
        adapter.scaling = scaling


def attach_saved_(model: nn.Module, tensors: Mapping[str, torch.Tensor], scaling: float) -> PeftModel:
    """Attach an adapter that `read_adapter` read to a model that has none. Rank and targets follow from the tensors."""
    factors = {n: t for n, t in tensors.items() if n.endswith(".lora_A.weight") and not is_of_experts(n)}
    ranks = {tensor.shape[0] for tensor in factors.values()}
    if len(ranks) != 1:
        raise CheckpointError(f"the adapter mixes ranks {sorted(ranks)}: only one rank for all linears is supported")
    rank = ranks.pop()
    leaves = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in factors}
    has_norms = any(".lora_" not in name for name in tensors)
    peft_model = attach_lora(model, rank, scaling * rank, tuple(sorted(leaves)), train_norms=has_norms)
    kind, expert_rank = describe(tensors)
    if expert_rank:
        attach_to_experts_(peft_model, kind, expert_rank, scaling)
    set_dtype_(peft_model, next(iter(tensors.values())).dtype)
    load_tensors_(peft_model, tensors)
    return peft_model.eval()


def _let_wrappers_say_what_acts_(model: nn.Module) -> None:
    """Give PEFT's wrappers of trained norms a method `acting()` that returns the norm which a call would reach.

    The layers need the norm itself, since they fuse it with other work (`qerl.model.decoder`).
    """
    from peft.utils import ModulesToSaveWrapper

    def acting(wrapper: ModulesToSaveWrapper) -> nn.Module:
        names = wrapper.active_adapters
        trained = names and not wrapper.disable_adapters and all(name in wrapper.modules_to_save for name in names)
        return wrapper.modules_to_save[names[0]] if trained else wrapper.original_module

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.acting = types.MethodType(acting, module)


def _norm_leaves(model: nn.Module) -> list[str]:
    from qerl.model.norms import block_norms

    return sorted({name.rpartition(".")[2] for name in block_norms(model)})


def _fused_lora() -> dict[type, type]:
    """PEFT's LoRA layers, except that plain LoRA on a frozen base is one autograd node (`qerl.model.lora`)."""
    import torch
    from peft.tuners.lora.layer import Linear

    from qerl.formats.linear import PackedLinear
    from qerl.model.lora import Part, lora_linear, part_of

    class FusedLoraLinear(Linear):
        """LoRA on a linear; `packed_in`: see `qerl.checkpoint.base_modules.pack_in_`."""

        packed_in = False

        def lora_part(self) -> Part | None:
            """The parts of this layer if it now computes plain LoRA with one adapter and no dropout; None otherwise."""
            base = part_of(self.base_layer)
            if base is None or self.disable_adapters or self.merged or self.fan_in_fan_out:
                return base if self.disable_adapters and not self.merged else None
            if self.packed_in and not torch.is_grad_enabled():
                return base
            names = [name for name in self.active_adapters if name in self.lora_A]
            if len(names) != 1:
                return None
            name = names[0]
            dropout, a, b = self.lora_dropout[name], self.lora_A[name], self.lora_B[name]
            drops = isinstance(dropout, torch.nn.Dropout) and dropout.p > 0 and self.training
            if drops or name in self.lora_variant or a.bias is not None or b.bias is not None:
                return None
            return Part(base.base, a.weight, b.weight, self.scaling[name], packed_in=self.packed_in)

        def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            part = None if args or kwargs else self.lora_part()
            if part is None and self.packed_in:
                raise CheckpointError(
                    "the adapter of a linear is in its packed weight, and something (dropout, a hook, a second "
                    "adapter) asks for it beside the weight, where it would count twice: leave that out"
                )
            return super().forward(x, *args, **kwargs) if part is None else lora_linear(x, [part])

    class PackedLoraLinear(FusedLoraLinear):
        """LoRA on a packed base. A merge raises, since it would lose the adapter."""

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise CheckpointError(
                "a LoRA cannot be merged into packed weights: rounding would swallow it; merge it into the 16-bit "
                "model, or serve the adapter as it is"
            )

    return {PackedLinear: PackedLoraLinear, torch.nn.Linear: FusedLoraLinear}
