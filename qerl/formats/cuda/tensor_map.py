"""Descriptions of matrices for Hopper's copy engine, which copies them tile by tile (CUtensorMap)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from qerl.base.errors import EngineError

BFLOAT16, SIZE = 9, 2  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, and bytes per value
ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """The 128 bytes of a map, passed to a kernel by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=8192)
def tensor_map(address: int, shape: tuple[int, int], tile: tuple[int, int], swizzled: bool = False) -> TensorMap:
    """The map of a contiguous bfloat16 matrix of `shape` (rows, columns) at `address`, copied in tiles (rows, columns).

    Rows must be aligned to 16 bytes. A tile that reaches beyond the matrix is filled with zeros. `swizzled` permutes
    the 16-byte chunks within each 128 bytes by row % 8. Raises EngineError if the driver refuses the map.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    sizes, steps = (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(shape[1] * SIZE)
    box, ones = (ctypes.c_uint32 * 2)(tile[1], tile[0]), (ctypes.c_uint32 * 2)(1, 1)
    no_interleave, promotion, zeros = 0, 2, 0  # promotion 2: 128 bytes are fetched into L2 at a time
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
