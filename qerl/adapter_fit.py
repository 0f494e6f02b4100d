"""Whether a saved adapter is one of a base, told from the files: before weights are loaded or an engine is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.errors import CheckpointError
from qerl.model import local_folder
from qerl.shards import read_json
from qerl.sizes import sizes_of

if TYPE_CHECKING:
    import torch

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def read_fitting_adapter(adapter: Path, base: str) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors and scaling of an adapter folder, as `read_adapter` does; CheckpointError if of another base."""
    from qerl.adapter import read_adapter

    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    return tensors, scaling


def check_fit(adapter: Path, tensors: Mapping[str, torch.Tensor], base: str) -> None:
    """Raise CheckpointError if A and B are not of the base's widths, or not of its layers."""
    sizes = sizes_of(read_json(Path(local_folder(base)) / "config.json"), base)
    layers = set()
    for name, tensor in tensors.items():
        if not name.endswith((A_SUFFIX, B_SUFFIX)):
            continue
        parts = name.split(".")
        layers.add(next((int(part) for part in parts if part.isdigit()), -1))
        rows, columns = sizes.projections.get(parts[-3], (None, None))
        own, expected = (tensor.shape[1], columns) if name.endswith(A_SUFFIX) else (tensor.shape[0], rows)
        if own != expected:
            there = "missing" if expected is None else f"{rows} x {columns}"
            raise CheckpointError(
                f"{adapter} is of another base than {base}: its {name} is {tuple(tensor.shape)} and the base's "
                f"{parts[-3]} {there}; give the base it was trained on"
            )
    if layers != set(range(sizes.layers)):
        raise CheckpointError(
            f"{adapter} is of another base than {base}: it has {len(layers)} layers and the base {sizes.layers}; give "
            "the base it was trained on"
        )
