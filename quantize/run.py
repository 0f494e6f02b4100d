"""`qerl quantize`: turn a 16-bit checkpoint into a quantized one in compressed-tensors' format (docs/quantize.md).

    qerl quantize --model Qwen/Qwen2.5-7B-Instruct                          # checkpoints/Qwen2.5-7B-Instruct-NVFP4A16
    qerl quantize --model M --scheme fp8_block                              # 8 bits: checkpoints/M-FP8_BLOCK

First everything is refused that the files' headers show to be impossible. Then the tensors stream through one pass over
calibration rows (`one_pass.py`), our own rounding to nearest, or llm-compressor's awq and gptq, into a hidden folder,
which is opened again, verified, and moved to its place in one step. `start/` beside the weights is what an adapter can
begin with.

Departure from the paper (arXiv 2510.11696), which quantizes with AWQ (`--method awq`): the default searches block
scales under the weights of the inputs and then runs GPTQ on rows that ship with qerl.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.activations import read_activations, with_input_scales
from qerl.checkpoint.base_start import START
from qerl.checkpoint.folder import REPORT, default_quantized_dir
from qerl.checkpoint.load import check_config_fits, load_tokenizer
from qerl.checkpoint.output import check_space, check_target, copy_small_files, staged_folder, write_json, write_weights
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.checkpoint.source import Source, packed_groups, power_of_two_scale_of, read_source
from qerl.checkpoint.verify import LayerCheck, ReadTensor, check_input_scales, verify
from qerl.formats.base import make_config
from quantize.calibration import HELD_OUT, MIXED, OWN_TASK, REAL_TOKENS, Calibration, load_calibration
from quantize.options import NO_ROWS, OWN, QuantizeOptions
from quantize.report import QuantizeReport, made_by

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from quantize.one_pass import Start
    from quantize.start import StartReport


logger = logging.getLogger(__name__)


START_RANK = 64  # of the file; runs use the first 32 components or as many as they say
LIMIT_S = 300.0  # for what is done without being asked for, by estimate
CPU_S = 1.65e-10  # per weight, token and thread, with SmolLM2-135M on two cores with AVX-512 (2.5 GHz, torch 2.13)
RESCALED = {"awq": "the source after AWQ's rescaling"}  # what weights are compared with where it is not the source


def quantize_checkpoint(model: str, out: Path | None = None, options: QuantizeOptions | None = None) -> QuantizeReport:
    """Quantize `model` (folder, hub id or `tiny`) into `out`, default `checkpoints/<name>-<SCHEME>`, and verify it.

    Raises ConfigError for wrong options, CheckpointError for the model or the folder, DataError for calibration rows,
    and MissingExtraError without llm-compressor. After any error `out` is as it was before; what a calibration made and
    the check refuses is kept beside it.
    """
    options = (options or QuantizeOptions()).chosen()
    options.check()
    if options.start_of is not None:
        raise ConfigError("start_of makes no checkpoint: call quantize.start.make_start")
    format = options.format
    named = replace(format, scheme=options.scheme_name)
    out = default_quantized_dir(model, named) if out is None else Path(out).expanduser()
    source = read_source(model, options.ignore, options.trust_remote_code, format=format)
    check_target(out, source.folder, options.overwrite, options.force)
    from quantize import compressor, one_pass  # which takes seconds: a wrong path is said before

    started = time.perf_counter()
    device = resolve_device(options.device)
    choice = choose(source, options, device)
    options = choice.options
    check_space(out, source.output_bytes() + one_pass.start_bytes(source, options.start_rank))
    _check_length(source, options)
    if options.method == "awq" and (source.decoder.linear or source.decoder.full):
        what = "norms have 1 + weight" if source.decoder.linear else "values are normed"
        raise ConfigError(
            f"--method awq moves scales through the weights of norms and values, and in {source.name} {what}: write "
            "--method search_gptq, or leave it out"
        )
    if options.by_compressor:
        logger.info("loading llm-compressor")
        compressor.load_compressor()
    logger.info("quantizing %s to %s: %s by %s", source.name, out, options.scheme_name, options.method)
    with staged_folder(out) as staging:
        report = _quantize(source, choice, device, staging, out)
        report = replace(report, seconds=round(time.perf_counter() - started, 3))
        write_json(staging / REPORT, report.to_json())
    logger.info("wrote %s in %.1f s", out, report.seconds)
    return report


def _check_length(source: Source, options: QuantizeOptions) -> None:
    longest = source.config.get("max_position_embeddings")
    if options.has_rows and isinstance(longest, int) and options.sequence_length > longest:
        raise ConfigError(
            f"--sequence-length {options.sequence_length} is more than the model's {longest} positions: write "
            f"--sequence-length {longest} or less"
        )


def _quantize(source: Source, choice: Choice, device: torch.device, staging: Path, out: Path) -> QuantizeReport:
    """Fill the staging folder with everything but the report, and verify it."""
    import torch

    try:
        return _write_and_verify(source, choice, device, staging, out)
    except torch.OutOfMemoryError as error:
        less = "--device cpu"
        if choice.options.by_compressor:
            less = "a smaller --batch-size or --calibration-size, or --method search"
        raise CheckpointError(f"the device ran out of memory while quantizing {source.name}: write {less}") from error


def _write_and_verify(source: Source, choice: Choice, device: torch.device, staging: Path, out: Path) -> QuantizeReport:
    from quantize import compressor, one_pass, output_error

    options, part = choice.options, source.part
    with ExitStack() as stack:
        check_config_fits(source.folder, source.tensors, options.trust_remote_code)
        if options.by_compressor:
            compressor.check_device(device)
        rows = calibration_rows(source, choice)
        if part:
            logger.info("%s: only its text part is written, as a text model", source.name)
            source = stack.enter_context(text_model(source, out)) if rows is not None else source
        read = stack.enter_context(TensorReader(source.tensors))
        start = one_pass.Start(options.start_rank) if options.start_rank else None
        groups, rescaled = _groups(source, options, read, rows, device, start)
        progress = stack.enter_context(progress_bar())
        inputs: dict[str, torch.Tensor] = {}
        if options.activations == "static":
            task = progress.add_task("calibrating activations", total=len(source.groups()) - 2)
            advance = partial(progress.advance, task)
            inputs = one_pass.streamed_input_scales(source, read, rows.sequences, device, advance)
            groups = with_input_scales(groups, inputs)
        steps = len(source.groups())
        written = write_weights(staging, progress.track(groups, total=steps, description="quantizing"))
        copied = copy_small_files(source.folder, staging, code="auto_map" in source.config)
        quantization = source.format.quantization_config(source.unquantized(), options.activations)
        write_json(staging / "config.json", {**source.config, "quantization_config": quantization})
        calibrated_by = options.method if options.by_compressor else None
        stack.enter_context(output_error.kept_if_calibrated(calibrated_by, staging, out))
        task = progress.add_task("verifying", total=len(source.tensors))
        judged = options.judges_weights
        layers = verify(staging, source, rescaled or read, device, lambda: progress.advance(task), judged)
        check_input_scales(staging, inputs)
        report = replace(
            _report(source, options, out, layers), bytes_after=written, copied_files=copied, text_part=part
        )
        if start is not None:
            report = replace(report, start=one_pass.save_start(staging, source, start, rows))
        if rows is not None:
            task = progress.add_task("measuring", total=len(source.groups()) - 2)
            decoded = stack.enter_context(TensorReader(read_tensors(staging)))
            activations = read_activations(staging, source.format) if source.format.four_bit_inputs else {}
            rounds = options.method == "rtn" and not options.by_compressor
            checkpoints = output_error.Checkpoints(
                *(read, rescaled, decoded, options.global_scale, rounds, activations),
                one_pass.read_factors(staging / START),
            )
            outputs = output_error.measure_outputs(source, checkpoints, rows, device, lambda: progress.advance(task))
            report = replace(report, calibration=rows.summary(), outputs=outputs)
            write_json(staging / REPORT, report.to_json())
            output_error.judge(outputs, source.format.min_sqnr_db)
    return report


def _report(source: Source, options: QuantizeOptions, out: Path, layers: list[LayerCheck]) -> QuantizeReport:
    return QuantizeReport(
        out=out,
        source=source.name,
        method=options.method,
        global_scale=options.global_scale if source.format.shared_tensor else None,
        scales=source.format.scales,
        layout=source.format.layout,
        scheme=options.scheme_name,
        activations=options.activations,
        ignore=options.ignore,
        kept_linears=source.kept,
        bytes_before=source.size_bytes(),
        sqnr_reference=RESCALED.get(options.method, "the source"),
        layers=layers,
        **made_by(),
    )


@contextmanager
def text_model(source: Source, beside: Path) -> Iterator[Source]:
    """The text part of a model for pictures and text as a text model of its own, for rows to go through.

    transformers opens a folder as its config says. So the part is written in 16 bits into a hidden folder beside
    `beside`, which is deleted at the end of the block. Raises CheckpointError if there is no space.
    """
    with TemporaryDirectory(dir=beside.absolute().parent, prefix=f".{beside.name}-text-") as name:
        folder = Path(name)
        write_json(folder / "config.json", source.config)
        check_space(folder, source.size_bytes())
        with TensorReader(source.tensors) as read:
            write_weights(folder, ({name: read(name) for name in group} for group in source.groups()))
        copy_small_files(source.folder, folder)
        yield replace(source, folder=folder, tensors=read_tensors(folder), part=False)


def calibration_rows(source: Source, choice: Choice) -> Calibration | None:
    """The rows to calibrate on and to measure on; None if there are none."""
    options = choice.options
    if not options.has_rows:
        return None
    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    size = options.calibration_size if options.uses_rows or options.start_rank else 0
    data = options.calibration or (OWN_TASK if len(tokenizer) < REAL_TOKENS else MIXED)
    rows = load_calibration(data, tokenizer, size, options.sequence_length, choice.held_out)
    widest = max(source.tensors[f"{module}.weight"].shape[1] for module in source.quantized)
    tokens = len(rows.sequences) * options.sequence_length
    if tokens < widest and (options.start_rank or options.method in ("search_gptq", "gptq")):
        logger.warning(
            "%d calibration tokens are fewer than the %d inputs of the widest linear, so that some directions of its "
            "inputs are not seen: give more rows as --calibration, or a larger --calibration-size",
            *(tokens, widest),
        )
    return rows


def _groups(
    source: Source,
    options: QuantizeOptions,
    read: TensorReader,
    rows: Calibration | None,
    device: torch.device,
    start: Start | None,
) -> tuple[Iterator[dict[str, torch.Tensor]], ReadTensor | None]:
    """The tensors to write, and where AWQ rescales the source, what it makes of it. `start` is filled on the way."""
    from quantize import one_pass

    if options.method in OWN:
        how = one_pass.Searched(options.global_scale, options.method == "search_gptq")
        if rows is None:
            return one_pass.searched_groups(source, read, device, how), None
        write = one_pass.searched(source, how)
        return one_pass.one_pass_groups(source, read, rows.sequences, device, write, start), None
    groups, rescaled = _groups_of_others(source, options, read, rows, device)
    if start is None:
        return groups, rescaled
    read = rescaled or read
    return one_pass.one_pass_groups(source, read, rows.sequences, device, lambda *_: next(groups), start), rescaled


def _groups_of_others(
    source: Source, options: QuantizeOptions, read: TensorReader, rows: Calibration | None, device: torch.device
) -> tuple[Iterator[dict[str, torch.Tensor]], ReadTensor | None]:
    """The same by rounding to nearest and by llm-compressor."""
    if not options.by_compressor:
        pow2 = source.format.shared_tensor is not None and options.global_scale == "pow2"
        return packed_groups(source, read, device, power_of_two_scale_of() if pow2 else None), None
    config = make_config(source.format, source.unquantized())
    from quantize import compressor

    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    if options.uses_rows:
        logger.info("calibrating on %d x %d tokens", len(rows.sequences), len(rows.sequences[0]))
    model = compressor.calibrate(source, tokenizer, rows if options.uses_rows else None, options)
    rescaled = partial(compressor.dense_tensor, source, model) if options.method == "awq" else None
    return compressor.calibrated_groups(source, config, model), rescaled


def resolve_device(name: str) -> torch.device:
    """The device that `--device NAME` means on this machine. Raises ConfigError if it cannot be used."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(" device type at start", 1)[0].rsplit("Expected one of", 1)
        raise ConfigError(
            f"--device {name} cannot be used here ({reason[0] or 'torch knows no such device'}): write auto or cpu"
        ) from error
    return device


def take_card(device: str, gpu: int | None) -> None:
    """Choose the card that `--device` and `--gpu` name. Raises ConfigError if they name two devices."""
    from qerl.base.devices import choose_card

    if device in ("auto", "cuda"):
        choose_card(gpu=gpu)
    elif gpu is not None:
        raise ConfigError(f"--gpu {gpu} and --device {device} name two devices: leave one of them out")


def progress_bar() -> Progress:
    from rich.progress import MofNCompleteColumn, Progress

    from qerl.base.printable import SafeConsole

    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=SafeConsole(stderr=True))


class Amount(NamedTuple):
    """How many sequences of how many tokens, and how many more to measure on."""

    size: int
    length: int
    held_out: int


ON_CARD = Amount(512, 256, 4 * HELD_OUT)  # in rows of 1024 the same tokens leave a fifth more KL (docs/lab/start.md)
ON_CPU = (Amount(64, 256, HELD_OUT), Amount(16, 256, 4))  # the first that does not take too long


class Choice(NamedTuple):
    """Options without anything left to choose, and how many sequences to hold out."""

    options: QuantizeOptions
    held_out: int


def choose(source: Source, options: QuantizeOptions, device: torch.device) -> Choice:
    """What to do with a model. Raises ConfigError for what a mixture of experts cannot be."""
    from quantize.one_pass import largest_rank

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
    """One line if less was chosen than on a GPU. The figures are for SmolLM2-135M."""
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
    """About how many seconds a choice takes on this machine's CPU: in proportion to weights and tokens.

    Of experts those count that a token gets.
    """
    import torch

    decoder, sizes = source.decoder, {name: source.tensors[f"{name}.weight"].shape for name in source.quantized}
    weights = sum(math.prod(size) * (decoder.share if decoder.place_of(name) else 1) for name, size in sizes.items())
    sequences = choice.options.calibration_size + choice.held_out
    return CPU_S * weights * sequences * choice.options.sequence_length / torch.get_num_threads()


def quantized(model: str, out: Path | None, gpu: int | None, options: QuantizeOptions) -> QuantizeReport | StartReport:
    """The report of the model quantized on one card, or on the CPU; with `start_of` a start's report."""
    from qerl.plan.threads import choose_threads

    take_card(options.device, gpu)
    choose_threads(model)
    if options.start_of is not None:
        from quantize.start import make_start

        return make_start(options.start_of, model, out, options)

    return quantize_checkpoint(model, out, options)
