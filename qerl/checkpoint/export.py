"""Write the model that a run with masters has trained: its packed base, with the trained weights packed anew.

The bytes are those that the engine held after a sync of these masters: the same arithmetic, under the base's own global
scales, which never change in a run. Trained norms and linears that the base keeps in 16 bits are rounded to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.kinds import format_of
from qerl.checkpoint.packed import Tensors
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import TensorInfo, read_json, read_tensors
from qerl.checkpoint.source import by_layer
from qerl.checkpoint.writer import copy_small_files, write_json, write_weights
from qerl.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from qerl.formats.base import Format


@dataclass(frozen=True)
class Masters:
    """A run's packed base, and the masters of a checkpoint that belong to it."""

    base: Path
    tensors: dict[str, TensorInfo]  # of the base
    trained: dict[str, TensorInfo]  # masters by tensor name, such as model.norm.weight
    format: Format

    @property
    def packed(self) -> set[str]:
        """The base's packed linears."""
        return set(self.format.quantized_linears(self.tensors))


def read_masters(base: Path, weights: Path) -> Masters:
    """Read the headers of both folders. Raises CheckpointError if the masters have no place in the base."""
    masters = Masters(base, read_tensors(base), read_tensors(weights), format_of(base))
    places = {f"{module}.weight" for module in masters.packed}.union(masters.tensors)
    if strange := sorted(set(masters.trained) - places):
        raise CheckpointError(
            f"{weights} holds {strange[0]}, for which {base} has no place: they are of different runs"
        )
    return masters


def packed_tensors(masters: Masters, device: torch.device) -> Iterator[Tensors]:
    """The tensors of the trained model, on the CPU, one decoder layer at a time."""
    packed, format = masters.packed, masters.format
    with TensorReader(masters.tensors) as old, TensorReader(masters.trained) as new:
        for names in by_layer(masters.tensors):
            written: Tensors = {}
            for name in names:
                module = name.rpartition(".")[0]
                if module not in packed or f"{module}.weight" not in masters.trained:
                    written[name] = new(name).to(old(name).dtype) if name in masters.trained else old(name)
                elif name == f"{module}.{format.tensors[0]}":
                    shared = old(f"{module}.{format.shared_tensor}").to(device) if format.shared_tensor else None
                    (tensors,) = format.quantize([new(f"{module}.weight").to(device)], shared)
                    written |= {f"{module}.{part}": tensor.cpu() for part, tensor in tensors.items()}
            yield written


def write_trained(masters: Masters, folder: Path, device: torch.device, track: Callable = iter) -> int:
    """Fill an empty `folder` with the trained model. Returns the bytes of its weights; `track` sees the layers pass."""
    written = write_weights(folder, track(packed_tensors(masters, device)))
    config = read_json(masters.base / "config.json")
    copy_small_files(masters.base, folder, code="auto_map" in config)
    write_json(folder / "config.json", config)
    return written
