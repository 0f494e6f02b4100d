"""The start of a quantized base: low-rank factors of what rounding took from its weights (docs/start.md).

    W   the 16-bit weight       Q   what the base holds       B0 A0   the best approximation of W - Q of a small rank

`qerl quantize` writes the factors into the folder `start/` of the base: a plain PEFT adapter whose scaling is 1, with
its components in order of what they repair, so that the first k of them are the best ones of rank k. A run uses a start
in one of two ways (`adapter.start`), which an adapter's trained_on.json remembers. Importing this loads no torch.

    frozen    B0 A0 stays beside the base, as if it were a part of its weights; the trained adapter starts at zero
    trained   the trained adapter starts at B0 A0
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import in_one_step, mode_by_umask
from qerl.checkpoint.adapter_file import PEFT_PREFIX, read_adapter
from qerl.checkpoint.folder import ADAPTER_FILES, TRAINED_ON, weights_digest
from qerl.checkpoint.shards import read_json

if TYPE_CHECKING:
    import torch

Kind = Literal["frozen", "trained"]
START, ABOUT = "start", "start.json"
DEFAULT_RANK = 32  # of a start that acts, where nothing says how many of the file's components should
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class BaseStart:
    """The first `rank` components of the factors in `folder`."""

    folder: Path
    rank: int

    def __str__(self) -> str:
        return f"{self.folder} (rank {self.rank})"


@dataclass(frozen=True)
class TrainedStart:
    """How an adapter was trained with a start: `digest` is of the components that acted."""

    kind: Kind
    rank: int
    digest: str


def start_beside(base: Path, rank: int | None = None, at_most: int = DEFAULT_RANK) -> BaseStart | None:
    """The start in the folder of a base; None if it has none. `rank` None: `at_most`, or what the file has if less.

    Raises ConfigError for a rank that the file does not have.
    """
    folder = base / START
    if not (folder / ADAPTER_FILES[0]).is_file():
        return None
    there = read_json(folder / ADAPTER_FILES[0]).get("r")
    if type(there) is not int or there < 1:
        raise CheckpointError(f"{folder / ADAPTER_FILES[0]} has r {there!r}, which is not a rank: quantize again")
    if rank is not None and rank > there:
        raise ConfigError(
            f"adapter.start_rank {rank} is more than the rank {there} of {folder}: write adapter.start_rank: {there} "
            f"or less, or make a larger start (`qerl quantize --start-rank {rank}`)"
        )
    return BaseStart(folder, rank or min(at_most, there))


def read_start(start: BaseStart) -> dict[str, torch.Tensor]:
    """A0 (rank, in) and B0 (out, rank) by base module name, as `qerl.checkpoint.adapter` names them.

    Raises CheckpointError for a folder that is not a whole start, ConfigError for a rank that it does not have.
    """
    from qerl.checkpoint.source import all_finite

    tensors, scaling = read_adapter(start.folder)
    if scaling != 1.0:
        raise CheckpointError(f"{start.folder} has alpha / rank {scaling:g}, and a start has 1: quantize again")
    found = {}
    for name, tensor in tensors.items():
        rank = tensor.shape[0] if name.endswith(LORA_A) else tensor.shape[1]
        if rank < start.rank:
            raise ConfigError(
                f"{start.folder} has rank {rank}, and {start.rank} is asked for: write adapter.start_rank: {rank}"
            )
        if not all_finite(tensor):
            raise CheckpointError(f"{start.folder} holds NaN or infinity in {name}: quantize again")
        found[name] = (tensor[: start.rank] if name.endswith(LORA_A) else tensor[:, : start.rank]).contiguous()
    return found


def check_start(start: BaseStart, base: str) -> None:
    """Raise CheckpointError unless the start fits the base and was made for the weights that the base has now."""
    from qerl.checkpoint.adapter import check_fit
    from qerl.checkpoint.load import local_folder

    tensors, _ = read_adapter(start.folder)
    check_fit(start.folder, tensors, base)
    made_for = about_start(start.folder).get("base_digest")
    if made_for is not None and made_for != base_digest(local_folder(base)):
        raise CheckpointError(
            f"{start.folder} was made for other weights than {base} has now: quantize again, or make the start anew "
            f"(`qerl quantize --start-of {base} --model THE_16_BIT_MODEL`), or write adapter.start: none"
        )


def about_start(folder: Path) -> dict:
    """What start.json says; empty without that file."""
    return read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}


def base_digest(base: Path) -> str:
    """16 hex digits that change with the weights of a base, and with nothing else in its folder."""
    return weights_digest(base, configs=())


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits of the factors that act, whatever the rank of the file that they were read from."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        total.update(f"{name}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def write_start(folder: Path, factors: Mapping[str, torch.Tensor], about: Mapping[str, object]) -> None:
    """Write factors (BF16, named as `read_start` returns them, all of one rank) as a start into an existing `folder`.

    `about` goes into start.json. The folder is read back and compared.
    """
    import torch
    from safetensors.torch import save_file

    saved = {f"{PEFT_PREFIX}{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in factors.items()}
    rank = {tensor.shape[0] for name, tensor in factors.items() if name.endswith(LORA_A)}.pop()
    leaves = sorted({name.removesuffix(LORA_A).rpartition(".")[2] for name in factors if name.endswith(LORA_A)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # the base whose folder this lies in; PEFT cannot load that by itself
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": leaves,
    }
    save_file(saved, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
    mode_by_umask(folder / ADAPTER_FILES[1])
    (folder / ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / ABOUT).write_text(json.dumps({"rank": rank, **about}, indent=1) + "\n", encoding="utf-8")
    if digest_of(read_start(BaseStart(folder, rank))) != digest_of(factors):
        raise CheckpointError(f"{folder} cannot be read back as it was written: check the disk, try again")


def copy_start(start: BaseStart, folder: Path, kind: Kind) -> None:
    """Write the components that act to a new `folder`, in one step, with what start.json says and with their `kind`."""
    about = {key: value for key, value in about_start(start.folder).items() if key != "rank"}
    tensors = read_start(start)
    with in_one_step(folder) as partial:
        write_start(partial, tensors, {**about, "kind": kind, "digest": digest_of(tensors)})
        partial.rename(folder)


def start_of_adapter(adapter: Path) -> TrainedStart | None:
    """The start that an adapter was trained with; None if it was trained without one.

    Its own trained_on.json says so, or for a checkpoint the start/ of its run. Raises CheckpointError for a file that
    cannot be understood.
    """
    said = read_json(adapter / TRAINED_ON) if (adapter / TRAINED_ON).is_file() else {}
    named = said.get("start")
    if "start" not in said:
        of_run = (about_start(folder / START) for folder in adapter.resolve().parents[:2])
        named = next((about for about in of_run if "kind" in about), None)
    if named is None:
        return None
    try:
        found = TrainedStart(named["kind"], named["rank"], named["digest"])
        if found.kind not in ("frozen", "trained") or type(found.rank) is not int:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{adapter / TRAINED_ON} names a start that cannot be read: copy the file again"
        ) from error
    return found


def find_start(adapter: Path, base: str) -> BaseStart | None:
    """The start that an adapter was trained with, wherever it is: in its run, beside the adapter, or with the base.

    None if it was trained without one. Raises CheckpointError if the components that it was trained with are nowhere.
    """
    wanted = start_of_adapter(adapter)
    if wanted is None:
        return None
    from qerl.checkpoint.load import local_folder

    looked = []
    for owner in (adapter, *adapter.resolve().parents[:2], base):  # the base comes last: it may not be on this machine
        place = (owner if isinstance(owner, Path) else local_folder(owner)) / START
        if not (place / ADAPTER_FILES[0]).is_file():
            continue
        looked.append(str(place))
        try:
            start = BaseStart(place, wanted.rank)
            if digest_of(read_start(start)) == wanted.digest:
                return start
        except (CheckpointError, ConfigError):
            continue
    looked = ", ".join(looked) or f"no {START}/ in {adapter} nor in {base}"
    raise CheckpointError(
        f"{adapter} was trained with a start of rank {wanted.rank} ({wanted.kind}) that is not here ({looked}): put "
        f"the {START}/ of its run or of its base beside it"
    )
