"""Links in a model's folder: followed within it, and in the hub's cache to the blobs of the same model, nowhere else.

A model comes from others, and what its files hold ends up in copies, cards, logs and prompts. A link in it could bring
any file of this machine there.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from qerl.base.errors import CheckpointError
from qerl.checkpoint.hub import MODEL_FILES

TEMPLATES = "additional_chat_templates"  # a folder of a model, which transformers reads and quantize copies
READ = (*MODEL_FILES, "*.py", "README.md", "tokenizer*", "vocab*", "chat_template*", TEMPLATES)


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a file of a model or an adapter is a link out of its folder.

    In the hub's cache, `models--owner--name/snapshots/commit/`, files are links into `models--owner--name/blobs/`.
    """
    real = folder.resolve()
    allowed = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        allowed.append(real.parents[1] / "blobs")
    for path in _links(folder):
        target = path.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{path} is a link to {target}, out of the model's folder, and such links are not followed: copy the "
                "file there in its place"
            )


def _links(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if any(fnmatchcase(path.name, pattern) for pattern in READ):
            if path.is_symlink():
                yield path
            elif path.name == TEMPLATES and path.is_dir():
                yield from (each for each in path.rglob("*") if each.is_symlink())
