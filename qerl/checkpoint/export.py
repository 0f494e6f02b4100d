"""Write the model that a run has trained through the quantizer, and upload a finished folder to the hub.

The packed base is written with the trained weights packed anew. The bytes are those that the engine held after a sync
of these masters: the same arithmetic, under the base's own global scales, which never change in a run. Trained norms
and linears that the base keeps in 16 bits are rounded to its dtype. Where an adapter was trained, W0 + s B A stands for
a master (`qerl.model.master`). In bfloat16 the masters are rounded once, and linears that were packed but not trained
are decoded, which is exact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError, ConfigError, first_line
from qerl.base.hub import HUB_ID
from qerl.checkpoint.activations import INPUT_SCALE
from qerl.checkpoint.adapter import A_SUFFIX, B_SUFFIX, check_fit
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.folder import BASE, MODEL, WEIGHTS, beside, format_of, weights_digest
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.output import copy_small_files, write_json, write_weights
from qerl.checkpoint.resolve import model_in_recipe, resolve_model
from qerl.checkpoint.shards import TensorInfo, TensorReader, read_json, read_tensors, with_own_head
from qerl.checkpoint.source import Tensors, all_finite, by_layer

if TYPE_CHECKING:
    import torch

    from qerl.formats.base import Format

    Read = Callable[[str], torch.Tensor]


# a tensor by its name

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, in new and in older files


@dataclass(frozen=True)
class PackedIn:
    """An adapter as `qerl.checkpoint.adapter_file` reads it, that is packed into the weights it is added to."""

    tensors: Mapping[str, torch.Tensor]
    scaling: float


@dataclass(frozen=True)
class Masters:
    """A run's packed base, and the masters of a checkpoint that belong to it.

    With an `adapter`, `trained` are the 16-bit weights that it changes, and what is read of them has the adapter in it.
    """

    base: Path
    tensors: dict[str, TensorInfo]  # of the base
    trained: dict[str, TensorInfo]  # masters by tensor name, such as model.norm.weight
    format: Format
    adapter: PackedIn | None = None

    @property
    def what(self) -> str:
        """What was trained, for a report."""
        return "masters" if self.adapter is None else "16-bit weights with the adapter"

    @contextmanager
    def reader(self) -> Iterator[Read]:
        """Reads masters by tensor name, on the CPU."""
        with TensorReader(self.trained) as read:
            yield read if self.adapter is None else partial(_with_adapter, read, self.adapter)

    @property
    def packed(self) -> set[str]:
        return set(self.format.quantized_linears(self.tensors))

    def output_bytes(self, dense: bool = False) -> int:
        """Bytes of the tensors to write."""
        total = sum(info.nbytes for info in self.tensors.values())
        for module in self.packed if dense else ():
            shapes = {part: self.tensors[f"{module}.{part}"].shape for part in self.format.tensors}
            total += (2 - self.format.bytes_per_weight) * math.prod(self.format.dense_shape(shapes))
        return int(total)


def _with_adapter(read: Read, adapter: PackedIn, name: str) -> torch.Tensor:
    import torch

    from qerl.model.master import LowRankSum

    if name in adapter.tensors:  # a norm
        return adapter.tensors[name]
    a, b = (adapter.tensors[name.removesuffix(".weight") + suffix] for suffix in (A_SUFFIX, B_SUFFIX))
    return LowRankSum(read(name), a, b, adapter.scaling).dense(torch.device("cpu"))


def read_trained(run: Path, checkpoint: Path) -> Masters:
    """What a checkpoint of `run` has trained: masters, or an adapter together with the run's 16-bit model.

    Raises CheckpointError if something is missing or of another run.
    """
    if (checkpoint / WEIGHTS).is_dir():
        return read_masters(run / BASE, checkpoint / WEIGHTS)
    start = _start_of(run)
    adapter = PackedIn(*read_adapter(checkpoint))
    check_fit(checkpoint, adapter.tensors, str(start))
    infos = read_tensors(start)
    names = {name.replace(A_SUFFIX, ".weight") for name in adapter.tensors if not name.endswith(B_SUFFIX)}
    base = run / BASE
    return Masters(base, read_tensors(base), {name: infos[name] for name in sorted(names)}, format_of(base), adapter)


def _start_of(run: Path) -> Path:
    """The folder of the 16-bit model that a run began from. Raises CheckpointError if it is gone or another by now."""
    name, about = model_in_recipe(run)[0], run / "run.json"
    try:
        folder = local_folder(resolve_model(beside(run, name)).base)
    except CheckpointError as error:
        raise CheckpointError(
            f"the adapter of {run} is added to the 16-bit weights of {name}, which is not here: put it back, or take "
            f"{run / MODEL}, which a finished run has ({error})"
        ) from error
    if about.is_file() and (began := read_json(about).get("weights")) not in (None, weights_digest(folder)):
        raise CheckpointError(
            f"{folder} holds other weights than when {run} began ({began}), and its adapter is added to those: put "
            f"them back, or take {run / MODEL}, which a finished run has"
        )
    return folder


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
            module, _, part = name.rpartition(".")
            trained = module in packed and f"{module}.weight" in masters.trained
            if not trained or part not in format.tensors:  # such as a bias
                written[name] = _master(new, name).to(old(name).dtype) if name in masters.trained else old(name)
            elif part == format.tensors[0]:
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
            module, _, part = name.rpartition(".")
            is_packed = module in packed and part in format.tensors
            weight = f"{module}.weight" if is_packed else name
            if weight in written or part == INPUT_SCALE:
                continue
            if weight in masters.trained:
                tensor = _master(new, weight)
            elif is_packed:
                parts = {part: old(f"{module}.{part}") for part in format.tensors}
                tensor = format.dequantize(parts, torch.bfloat16)
            else:
                tensor = old(name)
            written[weight] = tensor.to(torch.bfloat16)
        yield written


def _layers(masters: Masters) -> Iterator[tuple[list[str], Read, Read]]:
    """For each decoder layer, and for what is outside of them: the names of the base's tensors, and what reads a tensor
    of the base, and one of the masters."""
    with TensorReader(masters.tensors) as old, masters.reader() as new:
        for names in by_layer(masters.tensors):
            yield names, old, new


def _master(read: Read, name: str) -> torch.Tensor:
    tensor = read(name)
    if not all_finite(tensor):
        raise CheckpointError(
            f"the trained {name} holds NaN or infinity, so that its run went wrong before this checkpoint: export an "
            "earlier one (`qerl export --step`)"
        )
    return tensor


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
    write_json(folder / "config.json", with_own_head(config, read_tensors(folder)))
    return written


logger = logging.getLogger(__name__)


def check_push(repo: str) -> None:
    """Raise unless `repo` (owner/name) can be pushed to: checks its form, and asks the hub whose the token is."""
    if not HUB_ID.fullmatch(repo):
        raise ConfigError(f"--push-to-hub {repo!r} is no hub id: write owner/name, such as me/Qwen2.5-7B-gsm8k")
    from huggingface_hub import HfApi

    try:
        user = HfApi().whoami()
    except Exception as error:  # of httpx, of the hub's client, or an OSError
        raise CheckpointError(
            f"{repo} cannot be pushed: the hub does not answer, or does not take the token ({first_line(error)}): run "
            "`hf auth login` with one that may write, or leave --push-to-hub out and upload the folder later with `hf "
            "upload`"
        ) from error
    logger.info("will push to %s as %s", repo, user.get("name"))


def push(folder: Path, repo: str, private: bool) -> str:
    """Upload `folder` as a model repository and return its address. An existing repository gets another commit."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by qerl export")
    except Exception as error:  # of httpx, of the hub's client, or an OSError
        raise CheckpointError(
            f"{folder} is complete, but could not be pushed to {repo} ({first_line(error)}): try again with "
            f"`hf upload {repo} {folder}`"
        ) from error
    return str(url)
