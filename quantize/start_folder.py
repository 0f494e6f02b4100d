"""The start of a quantized checkpoint: from the pass that computed it into its folder, and back to be measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.checkpoint.base_start import (
    ABOUT,
    DEFAULT_RANK,
    LORA_A,
    LORA_B,
    START,
    BaseStart,
    base_digest,
    read_start,
    write_start,
)
from qerl.checkpoint.shards import read_json
from qerl.checkpoint.source import Source
from quantize.calibration import Calibration
from quantize.one_pass import Start, modules_of_start

if TYPE_CHECKING:
    import torch


BF16_BYTES = 2


def save_start(
    base: Path, source: Source, start: Start, rows: Calibration, folder: Path | None = None
) -> dict[str, Any]:
    """Write the start of `base`, which holds the verified weights, into `folder` (default: start/ in it).

    Returns the entry of quantize_report.json. Raises CheckpointError if it cannot be read back.
    """
    folder = folder or base / START
    folder.mkdir(exist_ok=True)
    about = {"rate_ratio": start.rate_ratio}
    write_start(
        folder,
        start.tensors,
        {"source": source.name, "base_digest": base_digest(base), **about, "calibration": rows.summary()},
    )
    return {"rank": start.rank, **about}


def start_bytes(source: Source, rank: int) -> int:
    """Bytes of a start of `rank` for a model."""
    return sum(BF16_BYTES * rank * sum(source.tensors[f"{name}.weight"].shape) for name in modules_of_start(source))


def read_factors(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A (rank, in) and B (out, rank) by module, of as many components as runs use; empty without a start."""
    if not (folder / ABOUT).is_file():
        return {}
    rank = read_json(folder / ABOUT)["rank"]
    tensors = read_start(BaseStart(folder, min(rank, DEFAULT_RANK)))
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    return {module: (tensors[module + LORA_A], tensors[module + LORA_B]) for module in modules}
