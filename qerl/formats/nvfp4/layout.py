"""What a quantized linear consists of: tensor names, shapes, dtypes, constants, and the checks on them.

The format is compressed-tensors `nvfp4-pack-quantized` with 4-bit weights and 16-bit activations (NVFP4A16), as
llm-compressor writes it and vLLM reads it. A linear `weight` (out, in) becomes three tensors:

    weight_packed        U8       (out, in / 2)    two e2m1 codes per byte, even column in the low nibble
    weight_scale         F8_E4M3  (out, in / 16)   one scale for 16 neighbours along in_features
    weight_global_scale  F32      (1,)             448 * 6 / amax; multiplies when encoding, divides when decoding

and `weight[o, i] = e2m1(code) * (weight_scale[o, i // 16] / weight_global_scale)`, in float32, then rounded.

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

BLOCK = 16  # weights that share one block scale
CODE_MAX = 6.0  # largest e2m1 value
SCALE_MAX = 448.0  # largest e4m3 value

PACKED = "weight_packed"
BLOCK_SCALE = "weight_scale"
GLOBAL_SCALE = "weight_global_scale"
INPUT_SCALE = "input_global_scale"  # float32 (1,), of a linear that rounds its input by a static scale
TENSORS = (PACKED, BLOCK_SCALE, GLOBAL_SCALE)

_SAFETENSORS_DTYPE = {"torch.uint8": "U8", "torch.float8_e4m3fn": "F8_E4M3", "torch.float32": "F32"}


def tensor_specs(out_features: int, in_features: int) -> dict[str, TensorSpec]:
    """The three tensors of a linear of this size, by name. Raises CheckpointError for a size that cannot be packed."""
    check_features(out_features, in_features)
    return {
        PACKED: TensorSpec("U8", (out_features, in_features // 2)),
        BLOCK_SCALE: TensorSpec("F8_E4M3", (out_features, in_features // BLOCK)),
        GLOBAL_SCALE: TensorSpec("F32", (1,)),
    }


def check_features(out_features: int, in_features: int, name: str = "linear") -> None:
    """Raise CheckpointError unless a weight (out_features, in_features) can be packed."""
    if out_features < 1 or in_features < BLOCK or in_features % BLOCK:
        raise CheckpointError(
            f"{name}: a weight of shape ({out_features}, {in_features}) cannot be NVFP4: in_features must be a "
            f"multiple of {BLOCK}, the block that shares a scale; leave this layer in 16 bits (ignore it)"
        )


def check_tensors(tensors: Mapping[str, torch.Tensor], name: str = "linear") -> tuple[int, int]:
    """Return (out_features, in_features) if the three tensors fit together; reads only shapes and dtypes.

    Raises CheckpointError, naming the tensor, if one does not fit.
    """
    packed = tensors[PACKED]
    if packed.ndim != 2:
        raise CheckpointError(f"{name}.{PACKED}: has shape {tuple(packed.shape)}, must be (out, in / 2)")
    out_features, in_features = packed.shape[0], packed.shape[1] * 2
    check_features(out_features, in_features, name)
    for tensor_name, spec in tensor_specs(out_features, in_features).items():
        check_tensor(tensors[tensor_name], spec, f"{name}.{tensor_name}")
    return out_features, in_features


def check_tensor(tensor: torch.Tensor, spec: TensorSpec, full_name: str) -> None:
    """Raise CheckpointError unless the tensor has the dtype and shape of `spec`."""
    dtype = _SAFETENSORS_DTYPE.get(str(tensor.dtype), str(tensor.dtype))
    if (dtype, tuple(tensor.shape)) != spec:
        raise CheckpointError(
            f"{full_name}: is {dtype} {tuple(tensor.shape)}, must be {spec.dtype} {spec.shape}; the checkpoint is "
            "damaged, was cast, or is of another size or format: quantize the 16-bit model with `qerl quantize`"
        )


def check_values(tensors: Mapping[str, torch.Tensor], name: str = "linear") -> None:
    """Raise CheckpointError for a NaN block scale or a global scale that is not finite and positive.

    Either may be missing from `tensors`. Codes are not checked, as every packed byte is valid. Waits for the device.
    """
    block_scale, global_scale = tensors.get(BLOCK_SCALE), tensors.get(GLOBAL_SCALE)
    nans = 0 if block_scale is None else int(block_scale.float().isnan().sum())
    if nans:
        raise CheckpointError(
            f"{name}.{BLOCK_SCALE}: {nans} block scales are NaN (code 0x7f or 0xff); the checkpoint is damaged or was "
            "quantized from weights with NaN: quantize the 16-bit model again"
        )
    if global_scale is not None and not 0.0 < float(global_scale) < float("inf"):
        raise CheckpointError(
            f"{name}.{GLOBAL_SCALE}: is {float(global_scale)}, must be finite and positive (448 * 6 / amax); "
            "quantize the 16-bit model again"
        )
