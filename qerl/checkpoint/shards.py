"""Check and list the safetensors files of a checkpoint from their headers, without loading any tensor.

A file starts with a little-endian uint64, the length of a JSON header that maps each tensor's name to its dtype,
shape and byte range in the rest of the file (https://github.com/huggingface/safetensors#format). Reading the header
is enough to know what a checkpoint holds and to notice a truncated or missing file before any long work.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from qerl.base.bounded import JSON_BYTES, parse_json, read_text
from qerl.base.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_AXES = 16
OTHER_NAMES = {"weight_scale_inv": "weight_scale"}  # what DeepSeek and Qwen call the scales of FP8 weights


class TensorSpec(NamedTuple):
    """The dtype, as safetensors writes it in a header, and the shape that a tensor must have."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A header's entry for one tensor; `dtype` is as safetensors writes it (`BF16`, `F8_E4M3`, `U8`, ...)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    stored_as: str | None = None  # its name in the file, where `read_tensors` gives it another


def read_json(path: Path) -> dict:
    """The JSON object in `path`. Raises CheckpointError if it is not one."""
    try:
        value = parse_json(read_text(path, JSON_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the path and its permissions"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy or download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object: copy or download it again")
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError if it is truncated or not a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _corrupt(path, f"{size} bytes, and no header where one belongs")
        raw = file.read(length)
    try:
        header = parse_json(raw.decode("utf-8"))
        header.pop("__metadata__", None)
        found = {name: _tensor_info(path, name, entry, size - 8 - length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, f"its header does not parse: {error}") from error
    _check_apart(path, header)
    return found


def _tensor_info(path: Path, name: str, entry: dict, data_bytes: int) -> TensorInfo:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise _corrupt(path, f"{name} has no dtype and shape that a tensor can have")
    if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)) or begin > end:
        raise _corrupt(path, f"{name} has the shape {shape} and the bytes {begin} to {end}")
    if end > data_bytes:
        raise _corrupt(path, f"{name} ends at byte {end} of the data, and the file holds {data_bytes}")
    if dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise _corrupt(path, f"{name} has {end - begin} bytes for {dtype} of shape {shape}")
    if math.prod(shape) > 8 * data_bytes:  # of dtypes that are unknown here; none has less than a bit for a number
        raise _corrupt(path, f"{name} has the shape {shape}, and the file holds {data_bytes} bytes")
    return TensorInfo(dtype, tuple(shape), path, end - begin)


def _check_apart(path: Path, header: dict) -> None:
    """Refuse tensors that share bytes, by which a small file could stand for a model of any size."""
    end, before = 0, ""
    for (begin, next_end), name in sorted((entry["data_offsets"], name) for name, entry in header.items()):
        if begin < end:
            raise _corrupt(path, f"{name} shares bytes with {before}")
        end, before = max(end, next_end), name


def _corrupt(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated or not a safetensors file ({detail}): copy or download it again")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, in the index's order.

    Raises CheckpointError if there is none, if there are only pickled files, or if the index names a missing one.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
            raise CheckpointError(
                f"{index} has no weight_map to file names (in its own folder): copy or download the file again"
            )
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(names)} shards that its index names "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): copy or download them again"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("model-*-of-*.safetensors")):
        raise CheckpointError(f"{folder} has shards but no {INDEX} to list them: copy or download it again")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} has its weights only as pickled files ({pickled[0]}), which can run code when opened and are "
            "never read: take a safetensors version of the model, or load and save it once with "
            "save_pretrained in a place where you trust it"
        )
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}: give a folder with the model's weights")


def _is_file_name(value: object) -> bool:
    """Whether it names a file of the index's own folder: a path would lead out of it."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name, from the headers of all its files; `OTHER_NAMES` are replaced by ours.

    Raises CheckpointError for what `weight_files` and `read_header` refuse, and if the index names a tensor that its
    file does not hold.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        tensors.update(read_header(path))
    index = folder / INDEX
    if index.is_file():
        for name, file in read_json(index)["weight_map"].items():
            if name not in tensors or tensors[name].file.name != file:
                raise CheckpointError(f"{index} says that {name} is in {file}, and it is not: download both again")
    return _renamed(tensors)


def _renamed(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same with our names. A name that is there already is not taken away from its tensor."""
    found = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        own = f"{module}.{OTHER_NAMES.get(leaf, leaf)}"
        renamed = leaf in OTHER_NAMES and own not in tensors
        found[own if renamed else name] = replace(info, stored_as=name) if renamed else info
    return found
