"""Number formats of a model's linears, registered by name: nvfp4, fp8_block and bf16.

A format is a value (`base.Format`) that everything else asks instead of comparing names: bytes per weight, how a folder
is recognised, how it is opened, packed, quantized, merged and served. A new one is a folder beside `nvfp4`, its linear
(a subclass of `linear.PackedLinear`), and one line at the end of this file. Importing this loads no torch.
"""

from __future__ import annotations

from qerl.base.errors import CheckpointError
from qerl.formats.base import BF16, Format
from qerl.formats.fp8.format import FP8_BLOCK
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


register(NVFP4)
register(FP8_BLOCK)
register(BF16)
