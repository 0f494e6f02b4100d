"""Whether the linears that engines multiply by as one matrix share the scale that they have to share.

vLLM takes the global scale of an expert's gate for its up as well, and says so in a warning at most: a folder that
gives them different ones would be another model there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.kinds import format_of
from qerl.checkpoint.linears import fused
from qerl.checkpoint.shards import TensorInfo, read_json, read_tensors, weight_files


def check_experts(folder: Path) -> None:
    """Raise CheckpointError if the experts in a packed folder do not share what they have to, or are in a format that
    they cannot be in; other folders are not read."""
    config, format = read_json(folder / "config.json"), format_of(folder)
    if not format.quantized or not decoder_of(config, str(folder)).has_experts:
        return
    rounds = format.activations(config.get("quantization_config")) != "none"
    if rounds or not format.holds_experts:
        raise CheckpointError(
            f"{folder} is a mixture of experts in {format.label}{', with rounded activations' if rounds else ''}, and "
            "qerl has experts in NVFP4 with 16-bit activations, or in 16 bits: quantize the 16-bit model with `qerl "
            "quantize`"
        )
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in weight_files(folder))
    if found := _unequal_experts(folder, stamps):
        raise CheckpointError(found)


@lru_cache(maxsize=8)
def _unequal_experts(folder: Path, stamps: tuple) -> str | None:
    """What is wrong, in words. It takes seconds with thousands of experts, and a command asks several times."""
    tensors, own = read_tensors(folder), format_of(folder)
    groups = [group for group in fused(own.quantized_linears(tensors)) if ".experts." in group[0]]
    try:
        check_shared(groups, tensors, own.shared_tensor, str(folder))
    except CheckpointError as error:
        return str(error)
    return None


def check_shared(groups: Iterable[Sequence[str]], tensors: Mapping[str, TensorInfo], tensor: str, name: str) -> None:
    """Raise CheckpointError, which calls the folder `name`, if linears that are fused differ in their `tensor`.

    It holds one number; `groups` holds module names as `fused` gives them.
    """
    several = [group for group in groups if len(group) > 1]
    names = [f"{module}.{tensor}" for group in several for module in group]
    scales = _numbers({each: tensors[each].file for each in names})
    for modules in several:
        found = {scales[f"{module}.{tensor}"] for module in modules}
        if len(found) > 1:
            raise CheckpointError(
                f"{name} gives {', '.join(modules)} different global scales {sorted(found)}, and vLLM, which fuses "
                "them, takes one for all: quantize the 16-bit model with `qerl quantize`, which shares them"
            )


def _numbers(files: Mapping[str, Path]) -> dict[str, float]:
    """The values of tensors that hold one number each, given the file of each."""
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    found = {}
    for file, names in by_file.items():
        try:
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_tensor(name).item() for name in names}
        except (SafetensorError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): copy or download it again") from error
    return found
