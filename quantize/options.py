"""What `qerl quantize` is asked, and how it chooses.

How `qerl quantize` is to quantize, as one value whose fields are its options. Importing this loads no torch.

What `qerl quantize` does where it was left the choice: the method, the number of rows, the rank of the start.

On a GPU all of it takes minutes. On a CPU it is estimated from the sizes, and where it would take longer than LIMIT_S,
fewer rows are used or none, and one line says what that costs. Whoever names a method or rows gets them in any case.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from qerl import formats
from qerl.base.errors import ConfigError
from qerl.checkpoint.source import Source
from qerl.formats.base import Format
from quantize.calibration import HELD_OUT
from quantize.one_pass import largest_rank, modules_of_start

if TYPE_CHECKING:
    import torch


SCHEMES = tuple(each.name for each in formats.all_formats() if each.scheme)
METHODS = ("auto", "search", "search_gptq", "rtn", "awq", "gptq")
OWN = ("search", "search_gptq")  # by quantize/rounding.py; the others are llm-compressor's
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
            "search_gptq: then GPTQ. By llm-compressor: rtn (round to nearest), awq, gptq."
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
        int | None, typer.Option(help="Calibration rows. Default: 128 on a GPU, 64 on a CPU.")
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of each. Default: 1024 on a GPU, 256 on a CPU.")
    ] = None
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
    def is_rounding(self) -> bool:
        """Whether the result is what others are compared with."""
        return self.method == "rtn" and self.observer is None

    @property
    def judges_weights(self) -> bool:
        """Whether each weight must be near the source's; under the inputs' weights only the outputs must be."""
        return not self.by_compressor and (self.method == "rtn" or not self.has_rows)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used together."""
        self._check_scheme()
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method!r} is not known: write {', '.join(METHODS)}")
        if self.global_scale not in GLOBAL_SCALES:
            raise ConfigError(f"--global-scale {self.global_scale!r} is not known: write {', '.join(GLOBAL_SCALES)}")
        self._check_observer()
        self._check_rows()
        if self.start_rank is not None and self.start_rank < 0:
            raise ConfigError(f"--start-rank {self.start_rank} is not a rank: write 0 for no start, or more")

    def _check_observer(self) -> None:
        if self.observer is None:
            return
        if self.observer not in OBSERVERS:
            raise ConfigError(f"--observer {self.observer!r} is not known: write {', '.join(OBSERVERS)}")
        if self.method not in ("rtn", "gptq"):
            raise ConfigError(
                f"--observer {self.observer} is of llm-compressor's rtn and gptq, not of --method {self.method}: write "
                "--method gptq as well, or leave it out"
            )
        if self.global_scale == "pow2":
            raise ConfigError(
                f"--observer {self.observer} --global-scale pow2: the power of two is an observer itself, and "
                "llm-compressor takes one: leave one of them out"
            )

    def _check_rows(self) -> None:
        if not self.has_rows:
            if self.calibrates:
                what = f"--method {self.method}" if self.observer is None else f"--observer {self.observer}"
                raise ConfigError(
                    f"{what} needs data: leave out --calibration none, or write --calibration FILE.jsonl or a hub data "
                    "set's name"
                )
            if self.start_rank:
                raise ConfigError(
                    f"--start-rank {self.start_rank} weights the error by the linears' inputs over rows: leave out "
                    "--calibration none, or write --start-rank 0"
                )
        for name in ("calibration_size", "sequence_length", "batch_size"):
            value, option = getattr(self, name), f"--{name.replace('_', '-')} {getattr(self, name)}"
            if value is not None and value < 1:
                raise ConfigError(f"{option} must be at least 1")
            if not self.has_rows and value != getattr(QuantizeOptions, name):
                raise ConfigError(
                    f"{option} is of calibration rows, and there are none: write --calibration FILE.jsonl as well, or "
                    "leave it out"
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
        if self.method not in ("auto", "rtn") or self.observer is not None:
            given = f"--method {self.method}" if self.observer is None else f"--observer {self.observer}"
            raise ConfigError(
                f"{given}: --scheme {self.scheme} rounds to nearest, which leaves nothing to calibrate: leave it out"
            )
        if self.start_rank:
            raise ConfigError(
                f"--start-rank {self.start_rank}: --scheme {self.scheme} has 8 bits, whose error is too small for a "
                "start: leave it out"
            )

    def _check_four_bit_inputs(self) -> None:
        if self.activations == "static" and not self.has_rows:
            raise ConfigError(
                "--activations static computes its scales from rows: leave out --calibration none, or write "
                "--activations dynamic"
            )
        if self.activations in ("static", "dynamic") and self.method == "awq":
            raise ConfigError(
                f"--method awq --activations {self.activations}: AWQ moves what is hard to round from weights to "
                "activations, which it takes for 16 bits: write --method gptq or rtn"
            )


START_RANK = 64  # of the file; runs use the first 32 components or as many as they say
LIMIT_S = 300.0  # for what is done without being asked for, by estimate
# Measured on two cores with AVX-512 (2.5 GHz, torch 2.13) on SmolLM2-135M.
FLOPS_PER_THREAD = 45e9  # of products in float32
SEARCH_S = 72e-9  # per weight and thread, by `quantize.rounding.searched_scales`
COLUMN_S = 1.2e-4  # per column and 500 rows, by `quantize.rounding.gptq`

logger = logging.getLogger(__name__)


class Amount(NamedTuple):
    """How many sequences of how many tokens, and how many more to measure on."""

    size: int
    length: int
    held_out: int


ON_CARD = Amount(128, 1024, HELD_OUT)
ON_CPU = (Amount(64, 256, HELD_OUT), Amount(16, 256, 4))  # the first that does not take too long


class Choice(NamedTuple):
    """Options without anything left to choose, and how many sequences to hold out."""

    options: QuantizeOptions
    held_out: int


def choose(source: Source, options: QuantizeOptions, device: torch.device) -> Choice:
    """What to do with a model. Raises ConfigError for what a mixture of experts cannot be."""
    options = options.settled(source.name, source.decoder.has_experts)
    if options.start_rank is None:
        options = replace(options, start_rank=START_RANK if options.has_rows else 0)
        asked = None
    else:
        asked = options.start_rank
    options = replace(options, start_rank=min(options.start_rank, largest_rank(source)))
    if not options.has_rows:
        return Choice(_by(options, "search"), 0)
    if device.type != "cpu":
        return _with(source, options, ON_CARD, "search_gptq")
    unasked = not replace(options, start_rank=asked).asks_for_rows
    if not unasked or options.format.shared_tensor is None:
        return _with(source, options, ON_CPU[0], "search_gptq")
    for amount, method in zip(ON_CPU, ("search_gptq", "search"), strict=True):
        choice = _with(source, options, amount, method)
        if estimate_s(source, choice) <= LIMIT_S:
            break
    else:
        choice = Choice(_by(replace(options, calibration=NO_ROWS, start_rank=0), "search"), 0)
    _say(source, options, choice)
    return choice


def _by(options: QuantizeOptions, method: str) -> QuantizeOptions:
    return replace(options, method=method if options.method == "auto" else options.method)


def _with(source: Source, options: QuantizeOptions, amount: Amount, method: str) -> Choice:
    """The options with numbers where none were given; sequences are at most as long as the model's positions."""
    longest = source.config.get("max_position_embeddings")
    length = min(amount.length, longest) if isinstance(longest, int) else amount.length
    chosen = replace(
        _by(options, method),
        calibration_size=options.calibration_size or amount.size,
        sequence_length=options.sequence_length or length,
    )
    return Choice(chosen, amount.held_out)


def _say(source: Source, options: QuantizeOptions, choice: Choice) -> None:
    """One line if less was chosen than on a GPU. The figures are those of SmolLM2-135M."""
    whole = _with(source, options, ON_CPU[0], "search_gptq")
    if choice == whole:
        return
    minutes = estimate_s(source, whole) / 60
    if choice.options.has_rows:
        cost = "block scales are searched under a few rows (KL 0.11 nats per token where GPTQ leaves 0.05)"
    elif choice.options.method in OWN:
        cost = "block scales are searched without rows (KL 0.18 nats per token where GPTQ leaves 0.05), without a start"
    else:
        cost = "there is no start (KL 0.21 nats per token where it leaves 0.06), and nothing is measured"
    named = "" if options.method == "auto" else f"--method {options.method} "
    better = "--method search_gptq" if options.method == "auto" else f"{named}--calibration mixed"
    logger.warning(
        "calibrating on this CPU would take about %.0f minutes: %s; `%s` does it all the same, a GPU in minutes",
        *(minutes, cost, better),
    )


def estimate_s(source: Source, choice: Choice) -> float:
    """About how many seconds a choice takes on this machine's CPU, beside reading and writing."""
    import torch

    options = choice.options
    shapes = {module: source.tensors[f"{module}.weight"].shape for module in source.quantized}
    share = {module: source.decoder.share if source.decoder.place_of(module) else 1.0 for module in shapes}
    weights = sum(rows * width for rows, width in shapes.values())
    active = sum(rows * width * share[module] for module, (rows, width) in shapes.items())
    leaders = [modules[0] for modules in source.fused_sets()]
    squares = sum(shapes[module][1] ** 2 * share[module] for module in leaders)
    products = seconds = 0.0
    if options.uses_rows or options.start_rank:
        products += 2 * options.calibration_size * options.sequence_length * (active + squares)
    if options.start_rank:
        starting = [shapes[module] for module in modules_of_start(source) if module in shapes]
        columns = 4 * 2 * (options.start_rank + 16)
        products += columns * sum(2 * rows * width + width * width for rows, width in starting)
    if options.method in OWN:
        seconds += SEARCH_S * weights / torch.get_num_threads()
    if options.method == "search_gptq":
        products += sum(shapes[module][1] ** 3 for module in leaders) + sum(r * w * w for r, w in shapes.values())
        seconds += COLUMN_S * sum(shapes[module][1] for module in leaders) + COLUMN_S / 500 * weights
    measured = choice.held_out * options.sequence_length
    vocabulary, hidden = source.tensors["model.embed_tokens.weight"].shape
    products += 2 * measured * (4 * (active + vocabulary * hidden) + 3 * active)  # four models, three errors of linears
    return products / (FLOPS_PER_THREAD * torch.get_num_threads()) + seconds
