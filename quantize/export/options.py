"""What is asked of `qerl export`, as one value whose fields are its options. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from qerl import formats
from qerl.base.errors import ConfigError

TARGETS = tuple(each.name for each in formats.writable())


@dataclass(frozen=True)
class ExportOptions:
    """What to export and how."""

    run: Annotated[Path, typer.Option(help="Directory of a run that trains through the quantizer.")]
    to: Annotated[
        Literal[TARGETS] | None,
        typer.Option(help="Default: as it was trained; bf16: the masters, or 16-bit weights with adapter."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Default: exported/<run>-<to>, with --step exported/<run>-N-<to>.")
    ] = None
    step: Annotated[int | None, typer.Option(min=1, help="Of this checkpoint; default: the last.")] = None
    push_to_hub: Annotated[str | None, typer.Option(help="Upload to this hub id (owner/name).")] = None
    public: Annotated[bool, typer.Option("--public", help="A new hub repository is public; default private.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that qerl wrote.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace it even if it holds files of others.")] = False
    device: Annotated[str, typer.Option(help="What packs: auto, cpu or cuda.")] = "auto"

    def check(self) -> None:
        """Raise ConfigError for a format that cannot be written."""
        if self.to not in (None, *TARGETS):
            raise ConfigError(f"--to {self.to!r} is not known: write {' or '.join(TARGETS)}")

    def of(self, trained: str) -> ExportOptions:
        """The same for a run that trains weights of the format `trained`."""
        return replace(self, to=self.to or trained)

    def folder(self) -> Path:
        """Where the model is written; call it on what `of` returns."""
        step = "" if self.step is None else f"-{self.step}"
        return self.out or Path("exported") / f"{self.run.expanduser().resolve().name}{step}-{self.to}"
