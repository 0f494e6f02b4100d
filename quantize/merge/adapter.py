"""Write the adapter as a standard PEFT folder: adapter_config.json, adapter_model.safetensors and the tokenizer.

For PEFT it names the 16-bit model of its base, and trained_on.json beside it names the base itself
(qerl/checkpoint/peft_folder.py).

PEFT, transformers and qerl load it as it is. So does vLLM, unless norms were trained with it: PEFT keeps those as
`modules_to_save`, which vLLM 0.25 refuses.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.base.files import mode_by_umask
from qerl.checkpoint.adapter_file import PEFT_PREFIX, to_peft
from qerl.checkpoint.folder import EMBEDDED, TRAINED_ON, beside, embedded_folder, model_of_adapter
from qerl.checkpoint.hub import is_hub_id
from qerl.checkpoint.output import TOKENIZER_CONFIG, write_json
from qerl.checkpoint.peft_folder import TrainedOn, add_tokenizer_, name_bases_, plain_base
from qerl.checkpoint.shards import read_json
from quantize.merge.base import Adapter

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(adapter: Adapter, folder: Path, base_name: str, dtype: torch.dtype | None = None) -> int:
    """Write the PEFT folder, with `base_name` as its base; `dtype` None keeps each tensor's own. Returns the bytes."""
    from safetensors.torch import save_file

    cast = {name: tensor.to(dtype or tensor.dtype) for name, tensor in adapter.tensors.items()}
    of_experts = {name: tensor for name, tensor in cast.items() if name in adapter.of_experts}
    cast = {name: tensor for name, tensor in cast.items() if name not in of_experts} | to_peft(of_experts)
    tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in cast.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    mode_by_umask(folder / WEIGHTS)
    write_json(folder / CONFIG, peft_config(adapter, base_name))
    _check_written(adapter, folder, dtype)
    return sum(tensor.nbytes for tensor in tensors.values())


def add_for_peft(adapter: Adapter, folder: Path, origin: TrainedOn) -> None:
    """Let the folder name a base that plain PEFT can open, and give it a tokenizer, if there is one on this machine.

    A base that is not here is named for both, and only where trained_on.json has something else to say.
    """
    if Path(origin.base).is_dir() or origin.start or adapter.settings:
        name_bases_(folder, origin, plain_base(origin) or origin.base)
    places = [adapter.folder, embedded_folder(origin.base)]
    if (adapter.folder / TRAINED_ON).is_file():  # qerl trains with the base's tokenizer
        places.reverse()
    there = [place for place in places if (place / TOKENIZER_CONFIG).is_file()]
    if there:
        add_tokenizer_(folder, str(there[0]))


def peft_config(adapter: Adapter, base_name: str) -> dict:
    """The adapter's adapter_config.json, set to inference on `base_name`."""
    config = {**read_json(adapter.folder / CONFIG), **adapter.settings}
    targets = config.get("target_modules")
    if isinstance(targets, list):  # PEFT writes a set, whose order changes from run to run
        config["target_modules"] = sorted(targets)
    return {**config, "base_model_name_or_path": base_name, "inference_mode": True}


def find_base_name(adapter: Adapter, asked: str | None) -> str:
    """The base to name: `asked`, else the one that the adapter names; a local folder as its full path."""
    if asked:
        name = asked
    elif (adapter.folder / TRAINED_ON).is_file():
        name = beside(adapter.folder, model_of_adapter(adapter.folder)[0])
    else:
        own = read_json(adapter.folder / CONFIG).get("base_model_name_or_path")
        name = own and beside(adapter.folder, own)
    if not name:
        raise CheckpointError(f"{adapter.folder / CONFIG} names no base: write `--base-name BASE` (hub id or folder)")
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if not is_hub_id(name):
        logger.warning(
            "the adapter's base %s is not here: the folder names it all the same (--base-name changes it)", name
        )
    return name


def _check_written(adapter: Adapter, folder: Path, dtype: torch.dtype | None) -> None:
    import torch

    from qerl.checkpoint.adapter_file import read_adapter

    tensors, scaling = read_adapter(folder)
    same = tensors.keys() == adapter.tensors.keys() and scaling == adapter.scaling
    if not same or not all(torch.equal(tensors[n], t.to(dtype or t.dtype)) for n, t in adapter.tensors.items()):
        raise CheckpointError("the written adapter does not pass its check and was removed: check the disk, try again")
