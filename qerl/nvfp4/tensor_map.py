"""Descriptions of matrices from which Hopper's copy engine takes tiles (CUtensorMap)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from qerl.errors import EngineError

BYTES, WORDS_OF_8, BFLOAT16 = 0, 4, 9  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT64, _BFLOAT16
SIZES = {BYTES: 1, WORDS_OF_8: 8, BFLOAT16: 2}
ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """128 bytes that a kernel takes by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=8192)
def tensor_map(
    address: int, kind: int, shape: tuple[int, int], tile: tuple[int, int], swizzled: bool = False
) -> TensorMap:
    """Of a contiguous matrix `shape` (rows, columns) at `address`, its rows 16-byte aligned, of which `tile` (rows,
    columns) is copied at a time; beyond its edges are zeros. `swizzled`: 16-byte chunks exchanged within 128 bytes by
    row % 8.

    Raises EngineError if the driver refuses it.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    sizes, steps = (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(shape[1] * SIZES[kind])
    box, ones = (ctypes.c_uint32 * 2)(tile[1], tile[0]), (ctypes.c_uint32 * 2)(1, 1)
    no_interleave, promotion, zeros = 0, 2, 0  # of what is fetched to L2: 128 bytes
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        kind,
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
