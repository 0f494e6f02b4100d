"""Write the model that a run with masters has trained: its packed base, with the trained weights packed anew.

The bytes are those that the engine held after a sync of these masters: the same arithmetic, under the base's own global
scales, which never change in a run. Trained norms and linears that the base keeps in 16 bits are rounded to its dtype.

In bfloat16 the masters are rounded once, and linears that were packed but not trained are decoded, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.kinds import format_of
from qerl.checkpoint.packed import Tensors, finite
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import TensorInfo, read_json, read_tensors
from qerl.checkpoint.source import by_layer
from qerl.checkpoint.writer import copy_small_files, write_json, write_weights
from qerl.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from qerl.formats.base import Format

    Read = Callable[[str], torch.Tensor]  # a tensor by its name

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, in new and in older files


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

    def output_bytes(self, dense: bool = False) -> int:
        """Bytes of the tensors to write."""
        total = sum(info.nbytes for info in self.tensors.values())
        return int(total + (2 - self.format.bytes_per_weight) * self._packed_weights()) if dense else total

    def _packed_weights(self) -> int:
        shapes = (
            self.format.dense_shape({part: self.tensors[f"{module}.{part}"].shape for part in self.format.tensors})
            for module in self.packed
        )
        return sum(rows * columns for rows, columns in shapes)


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
    for names, old, new in _layers(masters):
        written: Tensors = {}
        for name in names:
            module = name.rpartition(".")[0]
            if module not in packed or f"{module}.weight" not in masters.trained:
                written[name] = _master(new, name).to(old(name).dtype) if name in masters.trained else old(name)
            elif name == f"{module}.{format.tensors[0]}":
                before = {part: old(f"{module}.{part}").to(device) for part in format.tensors}
                tensors = format.quantize_like(before, _master(new, f"{module}.weight").to(device))
                written |= {f"{module}.{part}": tensor.cpu() for part, tensor in tensors.items()}
        yield written


def dense_tensors(masters: Masters) -> Iterator[Tensors]:
    """The tensors of the trained model in bfloat16, with the masters in place of packed weights, a layer at a time."""
    import torch

    packed, format = masters.packed, masters.format
    for names, old, new in _layers(masters):
        written: Tensors = {}
        for name in names:
            module = name.rpartition(".")[0]
            weight = f"{module}.weight" if module in packed else name
            if weight in written:
                continue
            if weight in masters.trained:
                tensor = _master(new, weight)
            elif module in packed:
                parts = {part: old(f"{module}.{part}") for part in format.tensors}
                tensor = format.dequantize(parts, torch.bfloat16)
            else:
                tensor = old(name)
            written[weight] = tensor.to(torch.bfloat16)
        yield written


def _layers(masters: Masters) -> Iterator[tuple[list[str], Read, Read]]:
    """For each decoder layer, and for what is outside of them: the names of the base's tensors, and what reads a tensor
    of the base, and one of the masters."""
    with TensorReader(masters.tensors) as old, TensorReader(masters.trained) as new:
        for names in by_layer(masters.tensors):
            yield names, old, new


def _master(read: Read, name: str) -> torch.Tensor:
    return finite(name, read(name))


def write_trained(
    masters: Masters, folder: Path, device: torch.device, track: Callable = iter, dense: bool = False
) -> int:
    """Fill an empty `folder` with the trained model; `dense`: in bfloat16, not packed.

    Returns the bytes of its weights; `track` sees the layers pass.
    """
    groups = dense_tensors(masters) if dense else packed_tensors(masters, device)
    written = write_weights(folder, track(groups))
    config = read_json(masters.base / "config.json")
    copy_small_files(masters.base, folder, code="auto_map" in config)
    if dense:
        del config["quantization_config"]
        config |= dict.fromkeys([key for key in DTYPE_KEYS if key in config] or DTYPE_KEYS[:1], "bfloat16")
    write_json(folder / "config.json", config)
    return written
