"""Number formats of a model's linears, registered by name: nvfp4, fp8_block, bf16, and mixed for one per linear.

A format is a value (`base.Format`) that everything else asks instead of comparing names: bytes per weight, how a folder
is recognised, how it is opened, packed, quantized, merged and served. A new one is a folder beside `nvfp4`, its linear
(a subclass of `linear.PackedLinear`), and one line at the end of this file. Importing this loads no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.base.errors import CheckpointError
from qerl.formats.base import BF16, METHOD, Format, Mixed
from qerl.formats.fp8 import format as fp8
from qerl.formats.fp8.format import FP8_BLOCK
from qerl.formats.nvfp4 import format as nvfp4
from qerl.formats.nvfp4.format import NVFP4

DEFAULT = NVFP4  # of recipes, and what `qerl quantize` writes

_registered: dict[str, Format] = {}


def register(format: Format) -> None:
    """Make a format known under its name, which must be new."""
    if format.name in _registered:
        raise ValueError(f"there is a format {format.name} already")
    _registered[format.name] = format


def unregister(name: str) -> None:
    """Forget a format again: for tests that register their own."""
    del _registered[name]


def all_formats() -> tuple[Format, ...]:
    """Every registered format, in the order in which they were registered."""
    return tuple(_registered.values())


def names() -> tuple[str, ...]:
    """The names of all formats, in the same order."""
    return tuple(_registered)


def get(name: str) -> Format:
    """The format of that name. Raises CheckpointError, with the names that there are, for an unknown one."""
    if name not in _registered:
        known = " or ".join(repr(each) for each in _registered)
        raise CheckpointError(f"format {name!r} is not known: write {known}")
    return _registered[name]


def writable(experts: bool = False) -> tuple[Format, ...]:
    """The formats in which `qerl merge` can write a model, or one with `experts`, 16-bit ones first."""
    found = (each for each in all_formats() if each.writable and (each.holds_experts or not experts))
    return tuple(sorted(found, key=lambda each: each.quantized))


MIXED = Mixed(
    name="mixed",
    label="mixed NVFP4 and FP8",
    folder_label="checkpoint of NVFP4 and FP8",
    model_label="model of NVFP4 and FP8",
    bytes_per_weight=FP8_BLOCK.bytes_per_weight,  # at most: a folder's own linears are counted one by one
    tensors=tuple(dict.fromkeys(NVFP4.tensors + FP8_BLOCK.tensors)),
    layout="mixed-precision",
    holds_experts=False,
    kernels=NVFP4.kernels,
    vllm_method="qerl_mixed",
    writable=False,
    parts=(NVFP4, FP8_BLOCK),
)
register(NVFP4)
register(FP8_BLOCK)
register(BF16)
register(MIXED)

_STATIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
MODELOPT: dict[str, tuple[Format, dict[str, Any]]] = {  # its algorithms, as compressed-tensors says the same
    "NVFP4": (NVFP4, {"weights": nvfp4.WEIGHTS, "input_activations": nvfp4.INPUTS["static"]}),
    "W4A16_NVFP4": (NVFP4, {"weights": nvfp4.WEIGHTS, "input_activations": None}),
    "FP8": (FP8_BLOCK, {"weights": fp8.PER_TENSOR, "input_activations": _STATIC_FP8}),
    "FP8_PB_WO": (FP8_BLOCK, {"weights": fp8.WEIGHTS, "input_activations": None}),
}


def of_modelopt(folder: Path, quantization: Mapping[str, Any]) -> dict[str, Any] | None:
    """What compressed-tensors would say of a folder of NVIDIA's ModelOpt; None if its linears are not quantized.

    `quantization` is that of config.json, or what hf_quant_config.json holds. Which linears are packed is seen from
    their tensors, and the head, which is decoded to 16 bits, is left out. Raises CheckpointError for an algorithm that
    qerl does not read.
    """
    own = quantization.get("quantization", quantization)
    try:
        if own["quant_algo"] is None:
            return None
        layers = own.get("quantized_layers") or {"": own}
        named = {name: layer["quant_algo"].upper() for name, layer in layers.items()}
        sizes = {layer.get("group_size") for name, layer in layers.items() if "NVFP4" in named[name]}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has a quantization_config of ModelOpt that cannot be read ({error!r}): copy "
            "or download its files again"
        ) from error
    if "MIXED_PRECISION" in named.values():
        raise CheckpointError(
            f"{folder} is quantized by ModelOpt as MIXED_PRECISION, and does not say how each linear is "
            "(quantized_layers): copy or download its files again"
        )
    if unknown := sorted(set(named.values()) - MODELOPT.keys()):
        raise CheckpointError(
            f"{folder} is quantized by ModelOpt as {', '.join(unknown)}, and qerl reads {', '.join(MODELOPT)}: give "
            "the model that it was made from"
        )
    if other := sorted(map(str, sizes - {None, nvfp4.WEIGHTS["group_size"]})):
        raise CheckpointError(
            f"{folder} is NVFP4 with group_size {', '.join(other)}, and qerl reads {nvfp4.WEIGHTS['group_size']}: give "
            "the model that it was made from"
        )
    algorithms = sorted({algorithm for name, algorithm in named.items() if name.rpartition(".")[2] != "lm_head"})
    kinds = [MODELOPT[algorithm] for algorithm in algorithms]
    groups = {f"group_{i}": {**group, "format": kind.layout} for i, (kind, group) in enumerate(kinds)}
    layout = kinds[0][0].layout if len(kinds) == 1 else MIXED.layout
    return {"quant_method": METHOD, "format": layout, "config_groups": groups}
