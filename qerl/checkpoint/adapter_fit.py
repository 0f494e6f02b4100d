"""Check that a saved adapter belongs to a base, from their files, before weights are loaded or an engine is opened."""

from __future__ import annotations

import logging
import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.checkpoint.expert_adapter import OF_EXPERTS, is_of_experts
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.named_base import EMBEDDED, beside
from qerl.checkpoint.quantized_folder import quantized_from
from qerl.checkpoint.shards import read_json
from qerl.plan.sizes import ModelSizes, sizes_of

if TYPE_CHECKING:
    import torch

    from qerl.checkpoint.experts import Decoder

logger = logging.getLogger(__name__)

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def read_fitting_adapter(adapter: Path, base: str) -> tuple[dict[str, torch.Tensor], float]:
    """Read an adapter folder as `read_adapter` does. Raises CheckpointError if it belongs to another base."""
    from qerl.checkpoint.adapter_file import read_adapter

    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    return tensors, scaling


def check_fit(adapter: Path, tensors: Mapping[str, torch.Tensor], base: str) -> None:
    """Raise CheckpointError unless A, B and trained norms have the base's widths and cover all of its layers.

    An adapter that names another base only causes a warning. A model can go by several names; but a different model of
    the same size would pass the check as well.
    """
    sizes = sizes_of(read_json(Path(local_folder(base)) / "config.json"), base)
    layers = defaultdict(set)  # by kind of linear or norm, the layers that the adapter has it for
    for name, tensor in tensors.items():
        parts = name.split(".")
        factor = name.endswith((A_SUFFIX, B_SUFFIX)) and "layers" in parts
        if not factor and not is_block_norm(name):
            raise CheckpointError(
                f"{adapter} changes {name} (it {_what(name)}): qerl takes LoRA on the linears of the decoder layers, "
                f"and the layers' norms; {_way_out(adapter)}, or train without them"
            )
        leaf = parts[-3] if factor else parts[-2]
        kind = f"experts.{leaf}" if is_of_experts(name) else leaf
        layers[kind].add(next((int(part) for part in parts if part.isdigit()), -1))
        if is_of_experts(name):
            own = _of_experts(leaf, sizes.decoder)
            expected = own and _expert_factor_shape(name, own, tensor)
        else:
            own = sizes.projections.get(leaf) if factor else (sizes.hidden,)
            expected = _factor_shape(name, own, tensor) if factor and own else own
        if tuple(tensor.shape) != expected:
            there = "missing" if own is None else " x ".join(map(str, own))
            raise CheckpointError(
                f"{adapter} is of another base than {base}: its {name} is {tuple(tensor.shape)} and the base's "
                f"{leaf} {there}; give the base it was trained on"
            )
    _check_layers(adapter, base, layers, sizes)
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
    """Whether a tensor's name is that of a decoder layer's norm, such as `model.layers.3.input_layernorm.weight`."""
    parts = name.split(".")
    return len(parts) > 3 and parts[-4] == "layers" and parts[-3].isdigit() and parts[-1] == "weight"


def _factor_shape(name: str, linear: tuple[int, int], tensor: torch.Tensor) -> tuple[int, int]:
    """The shape that A (rank, in) or B (out, rank) of a linear (out, in) must have, given the tensor's own rank."""
    return (tensor.shape[0], linear[1]) if name.endswith(A_SUFFIX) else (linear[0], tensor.shape[-1])


def _of_experts(leaf: str, decoder: Decoder) -> tuple[int, int, int] | None:
    """(experts, out, in) of a tensor of experts in memory; None if the model has none."""
    if not decoder.has_experts:
        return None
    gate_up = decoder.experts, 2 * decoder.width, decoder.hidden
    return gate_up if leaf == "gate_up_proj" else (decoder.experts, decoder.hidden, decoder.width)


def _expert_factor_shape(name: str, own: tuple[int, int, int], tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that a factor on experts must have, given its own rank, and whether it is shared by all of them."""
    outer = () if tensor.ndim == 2 else own[:1]
    rows, columns = (tensor.shape[-2], own[2]) if name.endswith(A_SUFFIX) else (own[1], tensor.shape[-1])
    return *outer, rows, columns


def _layers_with(kind: str, sizes: ModelSizes) -> set[int]:
    """The layers that have a kind of linear or norm."""
    every, sparse = set(range(sizes.layers)), set(sizes.decoder.sparse)
    if kind.startswith("experts."):
        return sparse
    return every - sparse if kind in OF_EXPERTS else every


def _what(name: str) -> str:
    """What an adapter has that qerl does not take, by the name of a tensor."""
    place = next((said for part, said in OUTSIDE.items() if part in name), None)
    if name.endswith(".bias"):
        return "has trained biases"
    if ".lora_" in name or ".base_layer." in name:
        return f"has LoRA on {place or 'modules outside of the decoder layers'}"
    return f"has {place} trained" if place else "has other trained modules (modules_to_save)"


OUTSIDE = {"embed_tokens": "the embeddings", "lm_head": "the head"}


def _way_out(adapter: Path) -> str:
    line = f"qerl merge --adapter {shlex.quote(str(adapter))} --to {formats.BF16.name}"
    return f"`{line}` makes one model of base and adapter, where the base has a place for all of it"


def _check_layers(adapter: Path, base: str, layers: Mapping[str, set[int]], sizes: ModelSizes) -> None:
    count = sizes.layers
    found, own = set().union(*layers.values()), set(range(count))
    if found < own and _of_some_layers(adapter, base, found):
        there = ", ".join(map(str, sorted(found)[:4])) + (", ..." if len(found) > 4 else "")
        raise CheckpointError(
            f"{adapter} acts in {len(found)} of the base's {count} layers ({there}): qerl takes adapters that have a "
            f"kind of linear or norm in all layers or in none; {_way_out(adapter)}"
        )
    if found != own:
        raise CheckpointError(
            f"{adapter} is of another base than {base}: it has {len(found)} layers and the base {count}; give "
            "the base it was trained on"
        )
    for leaf, there in layers.items():
        if more := sorted(there - _layers_with(leaf, sizes)):
            raise CheckpointError(
                f"{adapter} is of another base than {base}: it has {leaf} in layer {', '.join(map(str, more[:4]))}, "
                "and the base does not; give the base it was trained on"
            )
        if missing := sorted(_layers_with(leaf, sizes) - there):
            raise CheckpointError(
                f"{adapter} has nothing for {leaf} in layer {', '.join(map(str, missing[:4]))}: qerl takes adapters "
                f"that have a kind of linear or norm in all layers or in none; {_way_out(adapter)}"
            )


def _of_some_layers(adapter: Path, base: str, layers: set[int]) -> bool:
    """Whether an adapter on fewer layers than the base has may be one of that base: it says so, or has gaps."""
    config = read_json(adapter / "adapter_config.json")
    targets, named = config.get("target_modules"), config.get("base_model_name_or_path")
    chosen = isinstance(targets, str) or any("." in str(target) for target in targets or ())
    if chosen or config.get("layers_to_transform") is not None or layers != set(range(len(layers))):
        return True
    return bool(named and _names(beside(adapter, named)) & _names(base))


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
