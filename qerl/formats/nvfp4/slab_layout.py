"""Where our own product keeps each NVFP4 code and block scale: slabs of 16 rows, in units of 64 columns. Plain torch.

A unit of 256 rows x 64 columns has its 8 KiB of codes in one piece of memory, and its 1 KiB of block scales in another;
a block of `qerl/formats/cuda/sources/gemm.cu` copies a unit at a time. In a unit, a slab of 16 rows is 32 lanes x 4
words, with one word per 16 columns, which is the fragment of the tensor cores. Write row n and column k as

    n = 256 * rows_block + 16 * slab + 8 * half + lane_hi     k = 64 * unit + 16 * block + 8 * upper + 2 * lane_lo + odd

Then the four bits of code (n, k), the sign last, are at `BITS[odd][2 * upper + half]` of
`words[rows_block, unit, 128 * slab + 4 * (4 * lane_hi + lane_lo) + block]`. They are arranged so that a few shifts move
four codes into place in bfloat16 (`slabs.cuh`). Block scale (n, block) is
`scales[rows_block, unit, 64 * slab + 8 * lane_hi + 4 * (block // 2) + 2 * half + block % 2]`: five bits of exponent
(bias 10, no subnormals) and three of mantissa, which can represent every positive e4m3 value; 0 is zero. Codes under a
zero scale lose their magnitude, so that the kernel needs no special case. Rows and columns are padded with zeros.
"""

from collections.abc import Iterator

import torch

from qerl.base.errors import CheckpointError
from qerl.formats.nvfp4.layout import BLOCK
from qerl.formats.nvfp4.reference import unpack_codes

SLAB, ROWS, UNIT = 16, 256, 64
EXPONENT_BIAS = 10
BITS = (  # the places in a 32-bit word of a code's bits, low to high; indexed by odd, then 2 * upper + half
    ((6, 7, 8, 15), (28, 29, 30, 5), (0, 1, 2, 9), (10, 3, 4, 11)),
    ((22, 23, 24, 31), (12, 13, 14, 21), (16, 17, 18, 25), (26, 19, 20, 27)),
)
PIECE = 2**24  # about how many codes are packed at once, which takes some 150 MiB besides the result
LARGEST = 0x7E  # 448, the largest e4m3 byte that is a positive number


def pack(packed: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """A checkpoint's codes, uint8 (rows, columns / 2), and block scales, e4m3 (rows, columns / 16), in this layout.

    Returns words int32 (rows_blocks, units, 2048) and scales uint8 (rows_blocks, units, 1024). Raises CheckpointError
    for block scales that are negative or NaN, which the layout cannot represent.
    """
    stored = scales.view(torch.uint8)
    if wrong := int((stored > LARGEST).sum()):
        raise CheckpointError(
            f"{name}: {wrong} of {stored.numel()} block scales are negative or NaN, which no quantizer writes; the "
            "checkpoint is damaged: quantize the 16-bit model again with `qerl quantize`"
        )
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    blocks, units = -(-rows // ROWS), -(-columns // UNIT)
    words = torch.zeros(blocks, units, ROWS * UNIT // 8, dtype=torch.int32, device=packed.device)
    laid_scales = torch.zeros(blocks, units, ROWS * UNIT // BLOCK, dtype=torch.uint8, device=packed.device)
    pack_(words, laid_scales, 0, packed, scales)
    return words, laid_scales


def pack_(
    words: torch.Tensor, laid_scales: torch.Tensor, row_start: int, packed: torch.Tensor, scales: torch.Tensor
) -> None:
    """Overwrite rows from row_start on of the tensors that `pack` returned, in place; other rows keep their bits.

    `packed` and `scales` are as for `pack`, with the same columns, and no block scale may be negative or NaN.
    """
    columns = 2 * packed.shape[1]
    for start, end in _pieces(row_start, row_start + len(packed), columns):
        part, blocks = slice(start - row_start, end - row_start), slice(start // ROWS, -(-end // ROWS))
        new_codes, stored = unpack_codes(packed[part]), scales[part].view(torch.uint8)
        if (end - start) % ROWS:  # a part of one block, whose other rows must not change
            inside = slice(start % ROWS, start % ROWS + end - start)
            old_scales = block_scales(laid_scales[blocks], ROWS, columns).to(torch.float8_e4m3fn).view(torch.uint8)
            new_codes = _with_rows(codes(words[blocks], ROWS, columns), inside, new_codes)
            stored = _with_rows(old_scales, inside, stored)
        words[blocks] = _words(new_codes, stored)
        laid_scales[blocks] = _laid_scales(stored.view(torch.float8_e4m3fn))


def _pieces(start: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are either whole blocks, about PIECE codes at once, or part of one block."""
    step = max(1, PIECE // (ROWS * columns))
    while start < end:
        whole = 0 if start % ROWS else min((end - start) // ROWS, step)
        stop = start + whole * ROWS if whole else min(end, (start // ROWS + 1) * ROWS)
        yield start, stop
        start = stop


def _with_rows(tensor: torch.Tensor, rows: slice, new: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[rows] = new
    return tensor


def codes(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The e2m1 codes (rows, columns), uint8."""
    blocks, units = words.shape[:2]
    words = words.view(blocks, units, ROWS // SLAB, 8, 4, UNIT // BLOCK)
    grid = torch.empty(*words.shape, 2, 2, 2, dtype=torch.uint8, device=words.device)
    for odd in range(2):
        for place in range(4):
            code = sum((words >> target & 1) << bit for bit, target in enumerate(BITS[odd][place]))
            grid[..., odd, place // 2, place % 2] = code.to(torch.uint8)
    # to rows_block, slab, half, lane_hi; unit, block, upper, lane_lo, odd
    return grid.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(blocks * ROWS, units * UNIT)[:rows, :columns]


def block_scales(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The block scales (rows, columns / 16), float32."""
    blocks, units = scales.shape[:2]
    grid = scales.view(blocks, units, ROWS // SLAB, 8, 2, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    stored = grid.reshape(blocks * ROWS, units * (UNIT // BLOCK))[:rows, : columns // BLOCK].int()
    values = torch.ldexp(1 + (stored & 7).float() / 8, (stored >> 3) - EXPONENT_BIAS)
    return torch.where(stored == 0, 0.0, values)


def _words(codes: torch.Tensor, stored_scales: torch.Tensor) -> torch.Tensor:
    """Words int32 (rows_blocks, units, 2048) from codes uint8 (rows, columns) and the bytes of their block scales."""
    kept_bits = torch.where(stored_scales == 0, 8, 15).to(torch.uint8).repeat_interleave(BLOCK, dim=1)
    padded = _padded(codes & kept_bits, UNIT)
    units = padded.shape[1] // UNIT
    grid = padded.view(-1, ROWS // SLAB, 2, 8, units, UNIT // BLOCK, 2, 4, 2)
    # to rows_block, unit, slab, lane_hi, lane_lo, block; odd, upper, half
    grid = grid.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)
    words = torch.zeros(grid.shape[:6], dtype=torch.int32, device=codes.device)
    for odd in range(2):
        for place in range(4):
            code = grid[..., odd, place // 2, place % 2].to(torch.int32)
            for bit, target in enumerate(BITS[odd][place]):
                words |= (code >> bit & 1) << target
    return words.view(-1, units, ROWS * UNIT // 8)


def _laid_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales uint8 (rows_blocks, units, 1024), without subnormals, from e4m3 (rows, columns / 16), none negative."""
    values = scales.float()
    mantissa, exponent = torch.frexp(values)  # 0.5 <= mantissa < 1
    stored = (exponent - 1 + EXPONENT_BIAS) * 8 + (mantissa * 16 - 8).int()
    padded = _padded(torch.where(values == 0, 0, stored).to(torch.uint8), UNIT // BLOCK)
    units = padded.shape[1] // (UNIT // BLOCK)
    # rows as in `_words`, and each unit's blocks in two pairs
    grid = padded.view(-1, ROWS // SLAB, 2, 8, units, 2, 2).permute(0, 4, 1, 3, 5, 2, 6)
    return grid.reshape(-1, units, ROWS * UNIT // BLOCK)


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The tensor padded with zeros to whole blocks of rows and a multiple of `columns`."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % ROWS))
