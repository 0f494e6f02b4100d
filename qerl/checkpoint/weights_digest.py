"""A short digest of a folder's weights, by which a later run recognises whether they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

WHOLE_BYTES = 1 << 24  # files up to this size are hashed whole
PIECES, PIECE_BYTES = 256, 1 << 16  # of a larger file, so many pieces are hashed, evenly spread over it
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")


def weights_digest(folder: Path, configs: Sequence[str] = CONFIGS) -> str:
    """16 hex digits that change with a folder's safetensors files (names, sizes, contents: PIECES) and `configs`."""
    total = hashlib.sha256()
    for path in (folder / name for name in configs):
        if path.is_file():
            total.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                total.update(file.read())
                continue
            for piece in range(PIECES):
                file.seek(piece * (size - PIECE_BYTES) // (PIECES - 1))
                total.update(file.read(PIECE_BYTES))
    return total.hexdigest()[:16]
