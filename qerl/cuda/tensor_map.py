"""Descriptions of matrices from which Hopper's copy engine takes tiles (CUtensorMap)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from qerl.errors import EngineError

BFLOAT16, SIZE = 9, 2  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, and its bytes
ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """128 bytes that a kernel takes by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=8192)
def tensor_map(address: int, shape: tuple[int, int], tile: tuple[int, int], swizzled: bool = False) -> TensorMap:
    """Of a contiguous bfloat16 matrix `shape` (rows, columns) at `address`, of which `tile` (rows, columns) is copied
    at a time; beyond its edges are zeros. Its rows begin at 16 bytes. `swizzled`: 16-byte chunks exchanged within 128
    bytes by row % 8.

    Raises EngineError if the driver refuses it.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    sizes, steps = (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(shape[1] * SIZE)
    box, ones = (ctypes.c_uint32 * 2)(tile[1], tile[0]), (ctypes.c_uint32 * 2)(1, 1)
    no_interleave, promotion, zeros = 0, 2, 0  # of what is fetched to L2: 128 bytes
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        BFLOAT16,
        2,
        ctypes.c_void_p(address),
        sizes,
        steps,
        box,
        ones,
        no_interleave,
        3 if swizzled else 0,
        promotion,
        zeros,
    )
    if code:
        raise EngineError(f"CUDA refused a tensor map of {shape} by {tile} at {address:#x}: error {code}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
