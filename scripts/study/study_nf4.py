"""Copies a 16-bit checkpoint with its linear weights rounded to values that NF4 can hold (QLoRA, arXiv 2305.14314).

bitsandbytes keeps NF4 packed and dequantizes to 16 bits before each product. Here the dequantized values are stored, so
that the trainer and vLLM compute with the same numbers without bitsandbytes' kernels. So a run learns what QLoRA would
learn, but takes more memory and another time. Blocks are 64 values along the flattened weight, with one float32 absmax
each. QLoRA's second quantization, of the absmax, is left out: it would save 0.4 bits, at an error far below NF4's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 64
# Appendix E of arXiv 2305.14314, with the digits of bitsandbytes.
VALUES = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def round_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The weight rounded to the nearest NF4 values, in its shape and dtype."""
    blocks = weight.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    boundaries = (VALUES[1:] + VALUES[:-1]) / 2
    codes = torch.bucketize(blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny), boundaries)
    return (VALUES[codes] * absmax).reshape(weight.shape).to(weight.dtype)


def write_nf4_twin(base: Path, out: Path) -> int:
    """Copy `base` to `out` with every linear of its layers rounded; returns how many there were."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base, partial)
    count = 0
    for path in partial.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                tensors[name] = round_to_nf4(tensor)
                count += 1
        save_file(tensors, path, metadata={"format": "pt"})
    partial.rename(out)
    return count
