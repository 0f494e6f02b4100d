"""Write a checkpoint as its tensors arrive: safetensors files of bounded size, the index, and the small files."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.disk import mode_by_umask
from qerl.checkpoint.links import TEMPLATES
from qerl.checkpoint.shards import INDEX, SINGLE, read_json

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 5_000_000_000  # the same as the hub's own tools
OF_TOKENIZERS = (
    "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.tiktoken",
)  # fmt: skip
SMALL_FILES = ("generation_config.json", *OF_TOKENIZERS, "LICENSE*", "NOTICE*")
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_weights(folder: Path, groups: Iterable[dict[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write all tensors of `groups` in their order. Returns their bytes.

    A file is closed when the next group would make it larger than `shard_bytes`; its tensors stay in memory until then.
    """
    placed: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0
    for group in groups:
        size = _nbytes(group)
        if pending and _nbytes(pending) + size > shard_bytes:
            placed.append(_write_part(folder, len(placed), pending))
            pending = {}
        pending |= group
        total += size
    placed.append(_write_part(folder, len(placed), pending))
    _name_parts(folder, placed, total)
    return total


def _write_part(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = _part(folder, number)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps an OSError, of which it keeps only the text
        full = "No space left" in str(error) or "quota" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    mode_by_umask(path)
    return list(tensors)


def _name_parts(folder: Path, placed: list[list[str]], total: int) -> None:
    if len(placed) == 1:
        _part(folder, 0).rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(placed):
        file = f"model-{number + 1:05d}-of-{len(placed):05d}.safetensors"
        _part(folder, number).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def copy_small_files(source: Path, folder: Path, code: bool = False) -> list[str]:
    """Copy tokenizer, chat templates, generation config, licence and, with `code`, *.py files. Returns their names."""
    return _copy(source, folder, (*SMALL_FILES, "*.py") if code else SMALL_FILES)


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy a model's tokenizer files as they are beside an adapter, with code that they name.

    Returns False, and copies nothing, if they do not name the tokenizer's class: transformers would ask for that in a
    config.json, which an adapter has not.
    """
    path = source / TOKENIZER_CONFIG
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config.get("tokenizer_class"), str):
        return False
    _copy(source, folder, (*OF_TOKENIZERS, "*.py") if "auto_map" in config else OF_TOKENIZERS)
    return True


def _copy(source: Path, folder: Path, patterns: Iterable[str]) -> list[str]:
    names = sorted({path.name for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, copy_function=shutil.copyfile)
        names.append(TEMPLATES)
    return names


def write_json(path: Path, value: dict) -> None:
    """Write indented JSON in UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
