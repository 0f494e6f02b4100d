"""The text part of a model for pictures and text, as `qerl quantize` reads it.

Rounding to nearest takes the part's tensors where they are. Rows have to go through a model, and transformers opens a
folder as its config says; so for them the part is first written as a text model of its own, in 16 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from qerl.checkpoint.output import check_space, copy_small_files, write_json, write_weights
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_tensors
from qerl.checkpoint.source import Source

logger = logging.getLogger(__name__)


@contextmanager
def text_model(source: Source, beside: Path, rows: bool) -> Iterator[Source]:
    """A source that holds a text part, checked against its config.

    With `rows` it is a copy in a hidden folder beside `beside`, which is deleted at the end of the block. Raises
    CheckpointError if the config does not fit, or if there is no space.
    """
    from qerl.checkpoint.load import check_config_fits

    logger.info("%s: only its text part is written, as a text model (%s)", source.name, source.config["model_type"])
    where = {"dir": beside.absolute().parent, "prefix": f".{beside.name}-text-"} if rows else {}
    with TemporaryDirectory(**where) as name:
        folder = Path(name)
        write_json(folder / "config.json", source.config)
        check_config_fits(folder, source.tensors)
        yield _copied(source, folder) if rows else source


def _copied(source: Source, folder: Path) -> Source:
    """The text part in `folder`, which has its config."""
    check_space(folder, source.size_bytes())
    with TensorReader(source.tensors) as read:
        write_weights(folder, ({name: read(name) for name in group} for group in source.groups()))
    copy_small_files(source.folder, folder)
    return replace(source, folder=folder, tensors=read_tensors(folder), part=False)
