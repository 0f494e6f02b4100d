"""LoRA adapters in memory: attach one to a model, name its tensors, write the PEFT folder, check that one fits a base.

No other module imports peft. Tensors are named by the base model's modules, without PEFT's prefixes, so that every
engine and every file can be compared with the base:

    model.layers.0.self_attn.q_proj.lora_A.weight    (rank, in_features)
    model.layers.0.self_attn.q_proj.lora_B.weight    (out_features, rank)
    model.layers.0.input_layernorm.weight            (hidden,), only where norms are trained

`qerl.checkpoint.adapter_file` reads the folder, and adds the tensors on experts.
"""

from __future__ import annotations

import json
import logging
import shlex
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import JSON_BYTES, mode_by_umask, parse_json, read_text, replace_text
from qerl.checkpoint.adapter_file import (
    PEFT_PREFIX,
    adapters_of,
    attach_to_experts_,
    config_of_file,
    describe,
    expert_tensors,
    for_whole_,
    is_of_experts,
    read_adapter,
    to_peft,
)
from qerl.checkpoint.base_start import LORA_A, LORA_B, BaseStart, read_start
from qerl.checkpoint.experts import ModelShapes, shapes_of
from qerl.checkpoint.folder import ADAPTER_FILES, EMBEDDED, beside, is_text_part, quantized_from, whole_path
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.shards import read_config, read_json, read_tensors
from qerl.config.names import PROJECTIONS

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def read_fitting_adapter(adapter: Path, base: str) -> tuple[dict[str, torch.Tensor], float]:
    """Read an adapter folder as `read_adapter` does. Raises CheckpointError if it belongs to another base."""
    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    return tensors, scaling


def check_fit(adapter: Path, tensors: Mapping[str, torch.Tensor], base: str) -> None:
    """Raise CheckpointError unless A, B and trained norms have the base's widths and cover all of its layers.

    An adapter that names another base only causes a warning. A model can go by several names; but a different model of
    the same size would pass the check as well.
    """
    shapes = shapes_of(read_config(Path(local_folder(base))), base)
    layers = defaultdict(set)  # by kind of linear or norm, the layers that the adapter has it for
    norms = set()
    for name, tensor in tensors.items():
        parts = name.split(".")
        factor = name.endswith((A_SUFFIX, B_SUFFIX)) and "layers" in parts
        if not factor and not is_block_norm(name):
            raise CheckpointError(
                f"{adapter} changes {name}: qerl takes LoRA on the linears of the decoder layers, and the layers' "
                f"norms; {_way_out(adapter)}, or train without it"
            )
        leaf = parts[-3] if factor else parts[-2]
        norms |= set() if factor else {leaf}
        experts = f"experts.{leaf}" if is_of_experts(name) else None
        layers[experts or leaf].add(next((int(part) for part in parts if part.isdigit()), -1))
        own = shapes.shape_of(name.rpartition(".lora_")[0]) if factor else (shapes.hidden,)
        if experts:
            own = shapes.decoder.shape_in_memory(f"mlp.{experts}")
        expected = _factor_shape(name, own, tensor) if factor and own else own
        if tuple(tensor.shape) != expected:
            there = "missing" if own is None else " x ".join(map(str, own))
            raise CheckpointError(
                f"{adapter} is of another base than {base}: its {name} is {tuple(tensor.shape)} and the base's "
                f"{leaf} {there}; give the base it was trained on"
            )
    _check_layers(adapter, base, layers, shapes)
    _check_norms(adapter, base, norms)
    named = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    if named and not _names(beside(adapter, named)) & _names(base):
        logger.warning(
            "%s names %s as its base and acts on %s here: if these are two models, what comes out means nothing; give "
            "the adapter's own as --model",
            adapter,
            named,
            base,
        )


def is_block_norm(name: str) -> bool:
    """Whether a tensor's name is a decoder layer's norm, such as `model.layers.3.input_layernorm.weight`."""
    parts = name.split(".")
    return len(parts) > 3 and parts[-4] == "layers" and parts[-3].isdigit() and parts[-1] == "weight"


def _factor_shape(name: str, own: tuple[int, ...], tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that A (rank, in) or B (out, rank) of a linear (out, in) must have, given the tensor's own rank; also
    of linears (experts, out, in), whose factors may be shared by all of them."""
    outer = own[:-2] if tensor.ndim > 2 else ()
    rows, columns = (tensor.shape[-2], own[-1]) if name.endswith(A_SUFFIX) else (own[-2], tensor.shape[-1])
    return *outer, rows, columns


def _way_out(adapter: Path) -> str:
    line = f"qerl merge --adapter {shlex.quote(str(adapter))} --to {formats.BF16.name}"
    return f"`{line}` makes one model of base and adapter, where the base has a place for all of it"


def _check_layers(adapter: Path, base: str, layers: Mapping[str, set[int]], shapes: ModelShapes) -> None:
    for kind, there in layers.items():
        expected = set(shapes.decoder.sparse) if kind.startswith("experts.") else shapes.decoder.layers_with(kind)
        if odd := sorted(there ^ expected):
            raise CheckpointError(
                f"{adapter} acts on {kind} in {len(there)} layers, and {base} has it in {len(expected)} (not in both: "
                f"{', '.join(map(str, odd[:4]))}): give the base it was trained on; qerl takes adapters that have a "
                f"kind of linear or norm in all layers or in none; {_way_out(adapter)}"
            )


def _check_norms(adapter: Path, base: str, trained: set[str]) -> None:
    """Norms of decoder layers are trained, attached and synced all together."""
    tensors = read_tensors(Path(local_folder(base))) if trained else ()
    own = {name.split(".")[-2] for name in tensors if is_block_norm(name)}
    if left := sorted(own - trained):
        raise CheckpointError(
            f"{adapter} has {', '.join(sorted(trained))} trained and not {', '.join(left)}: qerl takes adapters that "
            f"train all norms of the decoder layers or none; {_way_out(adapter)}"
        )


def _names(model: str) -> set[str]:
    """The names of a model without owner or folder; for a quantized one also the name of the model it was made from."""
    names = [model]
    if model in EMBEDDED or Path(model).is_dir():
        folder = local_folder(model)
        names += [str(folder.resolve()), quantized_from(folder) or model]
    return {_without_suffix(_last_part(name.lower())) for name in names}


def _without_suffix(name: str) -> str:
    for format in formats.all_formats():
        name = name.removesuffix(format.folder_suffix.lower())
    return name


def _last_part(name: str) -> str:
    """The last part of an id or a path; for a snapshot in the hub's cache, models--owner--name/snapshots/commit, the
    name of the model."""
    parts = [part for part in name.split("/") if part]
    if parts[-2:-1] == ["snapshots"] and len(parts) > 2:
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else name


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

    from qerl.model.norms import block_norms

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
        modules_to_save=sorted({name.rpartition(".")[2] for name in block_norms(model)}) if train_norms else None,
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
    """Let the folders that the adapter is saved to name `base` (folder or hub id) as their base model, a folder by its
    full path."""
    model.peft_config[ADAPTER_NAME].base_model_name_or_path = whole_path(base)


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
    if is_text_part(str(model.peft_config[ADAPTER_NAME].base_model_name_or_path)):
        for_whole_(Path(folder))
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

    Raises CheckpointError unless names and shapes are the adapter's.
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

    The layers need the norm itself, since they fuse it with other work (`qerl.model.layers`).
    """
    from peft.utils import ModulesToSaveWrapper

    def acting(wrapper: ModulesToSaveWrapper) -> nn.Module:
        names = wrapper.active_adapters
        trained = names and not wrapper.disable_adapters and all(name in wrapper.modules_to_save for name in names)
        return wrapper.modules_to_save[names[0]] if trained else wrapper.original_module

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.acting = types.MethodType(acting, module)


def _fused_lora() -> dict[type, type]:
    """PEFT's LoRA layers, except that plain LoRA on a frozen base is one autograd node (`qerl.model.lora`)."""
    import torch
    from peft.tuners.lora.layer import Linear

    from qerl.formats.linear import PackedLinear
    from qerl.model.lora import Part, lora_linear, part_of

    class FusedLoraLinear(Linear):
        """LoRA on a linear; `packed_in`: see `qerl.checkpoint.adapter.pack_in_`."""

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


_TRAINED = f".modules_to_save.{ADAPTER_NAME}."  # in the name of a parameter of a trained norm


def pack_in_(model: nn.Module) -> None:
    """Let the attached adapter act through packed weights alone: whoever packs them adds s B A (`qerl.model.lora`)."""
    for module in model.modules():
        if hasattr(module, "lora_part"):
            module.packed_in = True


def set_start_(model: PreTrainedModel, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let A0 (r0, in) and B0 (out, r0), by base linear, act beside the packed weights of a model without an adapter.

    They are kept in the dtype that each linear computes in, without a copy where they have it. Linears left in 16 bits
    have factors of zero, which are left out. Raises CheckpointError for others that are not there or not packed.
    """
    from qerl.formats.linear import PackedLinear

    linears = base_linears(model)
    for name, (a, b) in factors.items():
        linear = linears.get(name)
        if linear is not None and not b.any():
            continue
        if not isinstance(linear, PackedLinear):
            raise CheckpointError(
                f"the base has no packed {name}, for which its start has factors: quantize it again, or write "
                "adapter.start: none"
            )
        linear.start = tuple(factor.to(linear.weight_device, linear.compute_dtype) for factor in (a, b))


def load_start_(model: PreTrainedModel, start: BaseStart) -> None:
    """`set_start_` with the factors of a start's folder."""
    tensors = read_start(start)
    names = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    set_start_(model, {name: (tensors[name + LORA_A], tensors[name + LORA_B]) for name in names})


def base_name(name: str) -> str | None:
    """The name that a module or parameter of a model with an adapter has in the base; None for one of the adapter.

    A norm that is trained has the name of the one that it stands for, which has None.
    """
    if ".lora_" in name or ".original_module" in name or ".modules_to_save." in name.replace(_TRAINED, "."):
        return None
    return name.replace(_TRAINED, ".").replace(".base_layer", "")


def base_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linears whose weights can change, by base module name: all but the head, which may be the embeddings."""
    import torch

    head = model.get_output_embeddings()
    named = ((base_name(name), module) for name, module in model.named_modules() if module is not head)
    return {name: module for name, module in named if name and isinstance(module, torch.nn.Linear)}


def base_norms(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters named `weight` that are vectors, by module name; those that act, where an adapter trains norms."""
    named = ((base_name(name), parameter) for name, parameter in model.named_parameters() if parameter.dim() == 1)
    return {name.removesuffix(".weight"): p for name, p in named if name and name.endswith(".weight")}
