"""How `qerl quantize` is to quantize, as one value whose fields are its options. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from qerl import formats
from qerl.errors import ConfigError
from qerl.formats.base import Format

SCHEMES = tuple(each.name for each in formats.all_formats() if each.scheme)
METHODS = ("auto", "rtn", "awq", "gptq")
GLOBAL_SCALES = ("auto", "amax", "pow2")  # see `qerl.nvfp4.reference.shared_global_scale`
SCALES = ("pow2", "fp32")  # see `qerl.fp8.reference`
ACTIVATIONS = ("auto", "none", "dynamic", "static")
FOUR_BITS = "NVFP4"  # llm-compressor's scheme of 4-bit weights and activations


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize. awq and gptq calibrate on some of the rows; all methods are measured on others of them."""

    method: Annotated[
        Literal[METHODS], typer.Option(help="auto: gptq with --calibration (nvfp4), else rtn, which needs no data.")
    ] = "auto"
    global_scale: Annotated[
        Literal[GLOBAL_SCALES],
        typer.Option(
            help="amax uses all of the format; pow2 is exact in bfloat16 (auto: pow2 for experts, amax for others)."
        ),
    ] = "auto"
    scheme: Annotated[
        Literal[SCHEMES], typer.Option(help="nvfp4: 4-bit weights; fp8_block: 8-bit weights, by rtn.")
    ] = formats.DEFAULT.name
    scales: Annotated[
        Literal[SCALES], typer.Option(help="Of fp8_block: powers of two, which decode exactly, or any float32.")
    ] = "pow2"
    activations: Annotated[
        Literal[ACTIVATIONS],
        typer.Option(
            help="none: in 16 bits (auto for nvfp4); else rounded in each product as weights are: dynamic (auto for "
            "fp8_block), or for nvfp4 by static scales, from --calibration."
        ),
    ] = "auto"
    ignore: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Linears to leave in 16 bits, as llm-compressor writes them: 're:.*self_attn.*'. Repeatable."
        ),
    ] = ()
    calibration: Annotated[str | None, typer.Option(help="Rows: a file, a folder, a task or a hub name.")] = None
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
        """The same with the method and the activations that auto stands for."""
        if self.scheme not in SCHEMES:
            return self  # `check` refuses it
        own = formats.get(self.scheme)
        calibrates = self.calibration and own.scales is None
        method = ("gptq" if calibrates else "rtn") if self.method == "auto" else self.method
        usual = "none" if own.four_bit_inputs else "dynamic"
        return replace(self, method=method, activations=usual if self.activations == "auto" else self.activations)

    def settled(self, name: str, experts: bool) -> QuantizeOptions:
        """The same for the model `name`, with or without experts. Raises ConfigError for what experts cannot be."""
        if experts and not (self.format.shared_tensor and self.activations == "none"):
            raise ConfigError(
                f"{name} is a mixture of experts, which qerl quantizes to NVFP4 with activations in 16 bits: leave out "
                "--scheme and --activations"
            )
        usual = "pow2" if experts else "amax"
        return replace(self, global_scale=usual if self.global_scale == "auto" else self.global_scale)

    @property
    def format(self) -> Format:
        """What is written."""
        own = formats.get(self.scheme)
        return own if own.scales is None else replace(own, scales=self.scales)

    @property
    def scheme_name(self) -> str:
        """What is written, as llm-compressor calls it; dynamic 4-bit activations have no name there."""
        own = self.format
        if not own.four_bit_inputs or self.activations not in ("static", "dynamic"):
            return own.scheme
        return FOUR_BITS if self.activations == "static" else f"{FOUR_BITS}-DYNAMIC"

    @property
    def uses_rows(self) -> bool:
        """Whether rows decide what is written; otherwise they only measure it."""
        return self.method != "rtn" or self.activations == "static"

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used together."""
        self._check_scheme()
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
            if not self.calibration and getattr(self, name) != getattr(QuantizeOptions, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} is of calibration rows, and there are none: "
                    "write --calibration FILE.jsonl as well, or leave it out"
                )

    def _check_scheme(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"--scheme {self.scheme!r} is not known: write {', '.join(SCHEMES)}")
        if self.scales not in SCALES:
            raise ConfigError(f"--scales {self.scales!r} is not known: write {', '.join(SCALES)}")
        if self.activations not in ACTIVATIONS:
            raise ConfigError(f"--activations {self.activations!r} is not known: write {', '.join(ACTIVATIONS)}")
        default, own = QuantizeOptions, formats.get(self.scheme)
        if own.scales is None:
            if self.scales != default.scales:
                raise ConfigError(
                    f"--scales {self.scales} is of 8-bit weights, not of --scheme {self.scheme}: leave it out"
                )
            self._check_four_bit_inputs()
            return
        if self.activations == "static":
            raise ConfigError(
                f"--activations static: --scheme {self.scheme} has dynamic scales only: write dynamic or none"
            )
        if self.global_scale != default.global_scale:
            raise ConfigError(
                f"--global-scale {self.global_scale}: --scheme {self.scheme} has none: write --scales pow2 or fp32"
            )
        if self.method not in ("auto", "rtn"):
            raise ConfigError(
                f"--method {self.method}: --scheme {self.scheme} rounds to nearest, which leaves nothing to calibrate: "
                "leave it out"
            )

    def _check_four_bit_inputs(self) -> None:
        if self.activations == "static" and not self.calibration:
            raise ConfigError(
                "--activations static computes its scales from rows: write --calibration FILE.jsonl or a hub data "
                "set's name, or --activations dynamic"
            )
        if self.activations in ("static", "dynamic") and self.method == "awq":
            raise ConfigError(
                f"--method awq --activations {self.activations}: AWQ moves what is hard to round from weights to "
                "activations, which it takes for 16 bits: write --method gptq or rtn"
            )
