"""Checks what vLLM's fused linears and our kernel require of an NVFP4 checkpoint, from its headers and global scales.

Loading would check the same in `linear.py` and `kernel.py`, but only after all weights have been read. No vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qerl.checkpoint.linears import fused
from qerl.checkpoint.shards import read_tensors
from qerl.errors import KERNEL, EngineError
from qerl.formats import NVFP4
from qerl.nvfp4.layout import GLOBAL_SCALE, PACKED


def check_checkpoint(folder: Path, kernel: str) -> None:
    """Raise EngineError if `kernel` does not take a shape, or if fused linears have different global scales."""
    from qerl.nvfp4 import gemm

    tensors = read_tensors(folder)
    groups = fused(NVFP4.quantized_linears(tensors))
    for modules in groups if kernel == "qerl" else []:
        shapes = [tensors[f"{module}.{PACKED}"].shape for module in modules]
        rows, columns = sum(shape[0] for shape in shapes), 2 * shapes[0][1]
        if not gemm.takes(rows, columns):
            raise EngineError(
                "%s is %d x %d, which qerl's kernel does not take: write %s",
                *(", ".join(modules), rows, columns, KERNEL.set_to("humming or marlin")),
            )
    several = [group for group in groups if len(group) > 1]
    names = [f"{module}.{GLOBAL_SCALE}" for group in several for module in group]
    scales = _numbers({name: tensors[name].file for name in names})
    for modules in several:
        found = {scales[f"{module}.{GLOBAL_SCALE}"] for module in modules}
        if len(found) > 1:
            raise EngineError(
                f"vLLM fuses {', '.join(modules)}, to which this checkpoint gives different global scales "
                f"{sorted(found)}; quantize it again with `qerl quantize`, which shares them"
            )


def _numbers(files: Mapping[str, Path]) -> dict[str, float]:
    """The values of tensors that hold one number each, given the file of each."""
    from safetensors import safe_open

    found = {}
    for file in dict.fromkeys(files.values()):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name).item() for name, of in files.items() if of == file}
    return found
