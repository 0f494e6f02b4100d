"""What is asked of `qerl quantize`, as one value whose fields are its options. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from qerl import formats
from qerl.base.errors import ConfigError, check_choices
from qerl.formats.base import Format

SCHEMES = tuple(each.name for each in formats.all_formats() if each.scheme)
METHODS = ("auto", "search", "search_gptq", "rtn", "awq", "gptq")
OWN = ("search", "search_gptq")  # by quantize/rounding.py
OBSERVERS = ("memoryless_minmax", "memoryless_mse", "imatrix_mse", "nvfp4_expanded_mse")  # llm-compressor's names
LEARNING_OBSERVERS = ("imatrix_mse",)  # those that need calibration rows
NO_ROWS = "none"  # as --calibration
GLOBAL_SCALES = ("auto", "amax", "pow2")  # see `qerl.formats.nvfp4.reference.shared_global_scale`
SCALES = ("pow2", "fp32")  # see `qerl.formats.fp8.reference`
ACTIVATIONS = ("auto", "none", "dynamic", "static")
FOUR_BITS = "NVFP4"  # llm-compressor's scheme of 4-bit weights and activations


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize. Calibration rows decide the result of most methods, and others of them measure it."""

    method: Annotated[
        Literal[METHODS],
        typer.Option(
            help="auto: search_gptq on a GPU or for a small model, else search. search: the best scale for each block; "
            "search_gptq: then GPTQ. rtn: to nearest. awq, gptq: by llm-compressor."
        ),
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
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Rows: a file, a folder, a task or a hub name; none: no data. Default (nvfp4): those that ship with "
            "qerl, mixed."
        ),
    ] = None
    calibration_size: Annotated[
        int | None, typer.Option(help="Calibration rows. Default: 512 on a GPU, 64 on a CPU.")
    ] = None
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of each. Default: 256.")] = None
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass of awq and gptq.")] = 1
    observer: Annotated[
        Literal[OBSERVERS] | None,
        typer.Option(help="How llm-compressor's rtn and gptq find block scales. Default: memoryless_minmax."),
    ] = None
    start_rank: Annotated[
        int | None,
        typer.Option(
            help="Rank of the start, the part of the error that an adapter repairs from the beginning; 0: none. "
            "Default: 64 for nvfp4."
        ),
    ] = None
    start_of: Annotated[
        str | None,
        typer.Option(help="Make only the start of this NVFP4 folder or hub model, which was made from --model."),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that qerl wrote.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace it even if it holds files of others.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.")
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"

    def chosen(self) -> QuantizeOptions:
        """The same with the activations that auto stands for, and what follows from a format of 8 bits."""
        if self.scheme not in SCHEMES:
            return self  # `check` refuses it
        own = formats.get(self.scheme)
        usual = "none" if own.four_bit_inputs else "dynamic"
        chosen = replace(self, activations=usual if self.activations == "auto" else self.activations)
        if own.scales is None:
            return chosen
        rank = 0 if self.start_rank is None else self.start_rank
        return replace(chosen, method="rtn" if self.method == "auto" else self.method, start_rank=rank)

    def settled(self, name: str, experts: bool) -> QuantizeOptions:
        """The same for the model `name`, with or without experts. Raises ConfigError for what experts cannot be."""
        if experts and not (self.format.shared_tensor and self.activations == "none"):
            raise ConfigError(
                f"{name} is a mixture of experts, which qerl quantizes to NVFP4 with activations in 16 bits: leave out "
                "--scheme and --activations"
            )
        usual = "pow2" if experts and self.observer is None else "amax"
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
    def has_rows(self) -> bool:
        """Whether there are rows: at first for all that do not refuse them, and for 8 bits only if some are named."""
        if self.calibration is None:
            return formats.get(self.scheme).scales is None
        return self.calibration != NO_ROWS

    @property
    def asks_for_rows(self) -> bool:
        """Whether rows are needed or named, so that they are used however long that takes."""
        named = self.calibration not in (None, NO_ROWS), self.calibration_size, self.sequence_length, self.start_rank
        return any(named) or self.calibrates or self.activations == "static"

    @property
    def calibrates(self) -> bool:
        """Whether a method was chosen that cannot do without rows."""
        return self.method in ("search_gptq", "awq", "gptq") or self.observer in LEARNING_OBSERVERS

    @property
    def uses_rows(self) -> bool:
        """Whether rows decide what is written, once all is settled; otherwise they only measure it."""
        return self.has_rows and (self.method != "rtn" or self.calibrates or self.activations == "static")

    @property
    def by_compressor(self) -> bool:
        """Whether llm-compressor's sequential pipeline computes the weights."""
        return self.method in ("awq", "gptq") or self.observer is not None

    @property
    def judges_weights(self) -> bool:
        """Whether each weight must be near the source's; under the inputs' weights only the outputs must be."""
        return not self.by_compressor and (self.method == "rtn" or not self.has_rows)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used together."""
        check_choices(self)
        default, own = QuantizeOptions, formats.get(self.scheme)
        if self.start_rank is not None and self.start_rank < 0:
            raise ConfigError(f"{self._option('start_rank')} is not a rank: write 0 for no start, or more")
        if own.scales is None:
            alien, why = [self.scales != default.scales and "scales"], "whose weights have 4 bits"
        else:
            alien, why = self._beside_8_bits(), "which rounds 8-bit weights to nearest by dynamic scales"
        for name in filter(None, alien):
            raise ConfigError(f"{self._option(name)} is not of --scheme {self.scheme}, {why}: leave it out")
        if self.activations in ("static", "dynamic") and self.method == "awq":
            raise ConfigError(
                f"--method awq --activations {self.activations}: AWQ moves what is hard to round from weights to "
                "activations, which it takes for 16 bits: write --method gptq or rtn"
            )
        self._check_observer()
        self._check_rows()

    def _option(self, name: str) -> str:
        return f"--{name.replace('_', '-')} {getattr(self, name)}"

    def _beside_8_bits(self) -> list[str | bool]:
        """The options given that weights of 8 bits have no use for."""
        return [
            self.activations == "static" and "activations",
            self.global_scale != QuantizeOptions.global_scale and "global_scale",
            self.observer is not None and "observer",
            self.method not in ("auto", "rtn") and "method",
            bool(self.start_rank) and "start_rank",
        ]

    def _check_observer(self) -> None:
        if self.observer is None:
            return
        given = self._option("observer")
        if self.method not in ("rtn", "gptq"):
            raise ConfigError(
                f"{given} is of llm-compressor's rtn and gptq, not of --method {self.method}: write --method gptq as "
                "well, or leave it out"
            )
        if self.global_scale == "pow2":
            raise ConfigError(
                f"{given} --global-scale pow2: the power of two is an observer itself, and llm-compressor takes one: "
                "leave one of them out"
            )

    def _check_rows(self) -> None:
        sizes = ("calibration_size", "sequence_length", "batch_size")
        for name in sizes:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{self._option(name)} must be at least 1")
        needing = [
            self.observer in LEARNING_OBSERVERS and "observer",
            self.calibrates and "method",
            self.activations == "static" and "activations",
            bool(self.start_rank) and "start_rank",
            *(getattr(self, name) != getattr(QuantizeOptions, name) and name for name in sizes),
        ]
        for name in () if self.has_rows else filter(None, needing):
            raise ConfigError(
                f"{self._option(name)} needs calibration rows, and there are none: write --calibration FILE.jsonl or a "
                "hub data set's name, or leave it out"
            )
