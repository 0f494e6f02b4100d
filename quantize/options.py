"""How `qerl quantize` is to quantize, as one value whose fields are its options. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from qerl.errors import ConfigError

METHODS = ("auto", "rtn", "awq", "gptq")
GLOBAL_SCALES = ("amax", "pow2")  # see `qerl.nvfp4.reference.shared_global_scale`


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize. awq and gptq calibrate on some of the rows; all methods are measured on others of them."""

    method: Annotated[
        Literal[METHODS], typer.Option(help="auto: gptq with --calibration, else rtn, which needs no data.")
    ] = "auto"
    global_scale: Annotated[
        Literal[GLOBAL_SCALES], typer.Option(help="amax uses all of the format; pow2 is exact in bfloat16.")
    ] = "amax"
    ignore: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Linears to leave in 16 bits, as llm-compressor writes them: 're:.*self_attn.*'. Repeatable."
        ),
    ] = ()
    calibration: Annotated[str | None, typer.Option(help="Rows: jsonl file, task or hub name.")] = None
    calibration_size: Annotated[int, typer.Option(help="Calibration rows (the paper: 256).")] = 256
    sequence_length: Annotated[int, typer.Option(help="Tokens of each (the paper: 2048).")] = 2048
    batch_size: Annotated[int, typer.Option(help="Calibration rows per forward pass.")] = 1
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that qerl wrote.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace it even if it holds files of others.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.")
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"

    def chosen(self) -> QuantizeOptions:
        """The same with the method that auto stands for."""
        return replace(self, method="gptq" if self.calibration else "rtn") if self.method == "auto" else self

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used together."""
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method!r} is not known: write {', '.join(METHODS)}")
        if self.global_scale not in GLOBAL_SCALES:
            raise ConfigError(f"--global-scale {self.global_scale!r} is not known: write {', '.join(GLOBAL_SCALES)}")
        if self.method in ("awq", "gptq") and not self.calibration:
            raise ConfigError(
                f"--method {self.method} needs data: write --calibration FILE.jsonl or a hub data set's name"
            )
        for name in ("calibration_size", "sequence_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
