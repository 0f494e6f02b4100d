"""The folder that `qerl quantize` makes of a model: where it is, which command makes it, and from what it was made.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from qerl import formats
from qerl.checkpoint.named_base import EMBEDDED
from qerl.checkpoint.shards import read_json
from qerl.formats.base import Format

CHECKPOINTS = Path("checkpoints")
REPORT = "quantize_report.json"


def quantized_from(folder: Path) -> str | None:
    """The model from which a quantized folder was made, according to its report; None if it has no report."""
    return read_json(folder / REPORT).get("source") if (folder / REPORT).is_file() else None


def default_quantized_dir(model: str, format: Format = formats.DEFAULT) -> Path:
    """Where `qerl quantize --model M` writes without --out: `checkpoints/<name>-<SCHEME>` under the current folder."""
    name = model if model in EMBEDDED else Path(model).expanduser().resolve().name if Path(model).exists() else model
    return CHECKPOINTS / f"{name.rstrip('/').rsplit('/', 1)[-1]}{format.folder_suffix}"


def quantize_line(model: str, format: Format) -> str:
    """The command that makes the folder of a model in a quantized format."""
    return f"qerl quantize --model {model}{'' if format is formats.DEFAULT else f' --scheme {format.name}'}"
