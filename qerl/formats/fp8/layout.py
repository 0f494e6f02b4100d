"""What a linear in block-scaled FP8 consists of: tensor names, shapes, dtypes, constants, and the checks on them.

A linear `weight` (out, in) becomes two tensors, of which the first keeps the name:

    weight        F8_E4M3  (out, in)                              codes
    weight_scale  F32      (ceil(out / 128), ceil(in / 128))      one scale for each block; multiplies when decoding

and `weight[o, i] = code[o, i] * weight_scale[o // 128, i // 128]`, in float32, then rounded. Where 128 does not divide
a side, the last blocks are smaller. compressed-tensors writes these names under its format `float-quantized` with the
strategy `block`. DeepSeek and Qwen call the scale `weight_scale_inv` (`qerl.checkpoint.shards` renames it), and others
than we write it in 16 bits. A scale is either any float32 number or a power of two; a file does not say which.

This module does not import torch, so that a checkpoint's headers can be checked without it; dtypes have the names of
safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.formats.base import TensorSpec

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of a block of weights, and columns of a group of activations
KERNEL_ROWS = 16  # a multiple of which vLLM's CUTLASS kernel takes
CODE_MAX = 448.0  # largest e4m3 value

CODES = "weight"
SCALE = "weight_scale"
TENSORS = (CODES, SCALE)


def blocks(size: int) -> int:
    """How many blocks a side of so many weights has."""
    return -(-size // BLOCK)


def tensor_specs(out_features: int, in_features: int) -> dict[str, TensorSpec]:
    """The two tensors of a linear of this size, by name. Raises CheckpointError for a size that cannot be quantized."""
    check_features(out_features, in_features)
    return {
        CODES: TensorSpec("F8_E4M3", (out_features, in_features)),
        SCALE: TensorSpec("F32", (blocks(out_features), blocks(in_features))),
    }


def check_features(out_features: int, in_features: int, name: str = "linear") -> None:
    """Raise CheckpointError unless a weight (out_features, in_features) can be quantized."""
    if out_features < 1 or in_features < 1:
        raise CheckpointError(f"{name}: a weight of shape ({out_features}, {in_features}) has nothing to quantize")


def check_tensors(tensors: Mapping[str, torch.Tensor], name: str = "linear") -> tuple[int, int]:
    """Return (out_features, in_features) if the two tensors fit together; reads only shapes and dtypes.

    Raises CheckpointError, naming the tensor, if one does not fit.
    """
    codes, scale = tensors[CODES], tensors[SCALE]
    if codes.ndim != 2 or str(codes.dtype) != "torch.float8_e4m3fn":
        raise CheckpointError(
            f"{name}.{CODES}: is {codes.dtype} {tuple(codes.shape)}, and FP8 weights are torch.float8_e4m3fn (out, "
            "in): the checkpoint was cast or is of another format, give the model that it was made from"
        )
    expected = (blocks(codes.shape[0]), blocks(codes.shape[1]))
    if tuple(scale.shape) != expected or not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
        raise CheckpointError(
            f"{name}.{SCALE}: is {scale.dtype} {tuple(scale.shape)}, and codes {tuple(codes.shape)} need "
            f"torch.float32 {expected}, a scale for each block of {BLOCK} x {BLOCK}: give the model that it was made "
            "from"
        )
    return codes.shape[0], codes.shape[1]


def check_values(tensors: Mapping[str, torch.Tensor], name: str = "linear") -> None:
    """Raise CheckpointError for a code that is NaN, or a scale that is not finite and positive.

    Either may be missing from `tensors`. Waits for the device.
    """
    codes, scale = tensors.get(CODES), tensors.get(SCALE)
    again = "the checkpoint is damaged or was made of weights with NaN: quantize the 16-bit model again"
    if codes is not None and (nans := int(codes.isnan().sum())):
        raise CheckpointError(f"{name}.{CODES}: {nans} codes are NaN (0x7f or 0xff); {again}")
    if scale is not None and (wrong := int((~(scale.isfinite() & (scale > 0))).sum())):
        raise CheckpointError(
            f"{name}.{SCALE}: {wrong} of {scale.numel()} scales are zero, negative, infinite or NaN; {again}"
        )
