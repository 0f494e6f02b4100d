"""`qerl quantize`: turn a 16-bit checkpoint into a quantized one in the format of compressed-tensors.

    qerl quantize --model Qwen/Qwen2.5-7B-Instruct                          # checkpoints/Qwen2.5-7B-Instruct-NVFP4A16
    qerl quantize --model M --calibration rows.jsonl                        # GPTQ on 256 x 2048 tokens
    qerl quantize --model M --method awq --calibration rows.jsonl           # as the paper does
    qerl quantize --model M --global-scale pow2                             # scales that may stay while weights change
    qerl quantize --model M --scheme fp8_block                              # 8 bits: checkpoints/M-FP8_BLOCK
    qerl quantize --model M --activations static --calibration rows.jsonl   # W4A4: checkpoints/M-NVFP4
    qerl quantize --model M --ignore 're:.*self_attn.*' --out ffn-only      # feed-forward layers only

First everything is refused that the files' headers show to be impossible. Then the tensors stream through
llm-compressor (FP8: through our own reference) into a hidden folder, which is opened again, verified, and moved to its
place in one step.

Departure from the paper (arXiv 2510.11696), which quantizes with AWQ: with rows the default is GPTQ, whose outputs have
the smallest error (benchmarks/quantization), and without rows rounding to nearest, which the paper's published code
does too. `--method awq` is the paper's recipe.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.activations import read_activations
from qerl.checkpoint.input_scales import with_input_scales
from qerl.checkpoint.output import check_space, check_target, staged_folder
from qerl.checkpoint.packed import packed_groups, power_of_two_scale_of
from qerl.checkpoint.quantized_folder import REPORT, default_quantized_dir
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_tensors
from qerl.checkpoint.source import Source, read_source
from qerl.checkpoint.verify import LayerCheck, ReadTensor, check_input_scales, verify
from qerl.checkpoint.writer import copy_small_files, write_json, write_weights
from qerl.errors import CheckpointError, ConfigError
from qerl.formats.scheme import make_config
from quantize.calibrated import Recipe, calibrate, calibrated_groups, check_device, dense_tensor
from quantize.calibration import HELD_OUT, Calibration, load_calibration
from quantize.compressor import check_installed, load_compressor
from quantize.input_amax import streamed_input_scales
from quantize.judge import judge, kept_if_calibrated
from quantize.options import QuantizeOptions
from quantize.output_error import Checkpoints, measure_outputs
from quantize.report import QuantizeReport
from quantize.rtn import rtn_groups
from quantize.text_model import text_model

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

PACKAGES = ("qerl", "llmcompressor", "compressed-tensors", "transformers", "torch")
COMPARED_WITH = {"rtn": "the source", "awq": "the source after AWQ's rescaling", "gptq": "the source"}

logger = logging.getLogger(__name__)


def quantize_checkpoint(model: str, out: Path | None = None, options: QuantizeOptions | None = None) -> QuantizeReport:
    """Quantize `model` (folder, hub id or `tiny`) into `out`, default `checkpoints/<name>-<SCHEME>`, and verify it.

    Raises ConfigError for wrong options, CheckpointError for the model or the folder, DataError for calibration rows,
    and MissingExtraError without llm-compressor. After any error `out` is as it was before; what a calibration made and
    the check refuses is kept beside it.
    """
    started = time.perf_counter()
    options = (options or QuantizeOptions()).chosen()
    options.check()
    format = options.format
    if format.shared_tensor is not None:
        check_installed()
    named = replace(format, scheme=options.scheme_name)
    out = default_quantized_dir(model, named) if out is None else Path(out).expanduser()
    source = read_source(model, options.ignore, options.trust_remote_code, format=format)
    options = options.settled(source.name, source.decoder.has_experts)
    check_target(out, source.folder, options.overwrite, options.force)
    check_space(out, source.output_bytes())
    _check_length(source, options)
    logger.info("quantizing %s to %s: %s by %s", source.name, out, options.scheme_name, options.method)
    with staged_folder(out) as staging:
        report = _quantize(source, options, staging, out)
        report = replace(report, seconds=round(time.perf_counter() - started, 3))
        write_json(staging / REPORT, report.to_json())
    logger.info("wrote %s in %.1f s", out, report.seconds)
    return report


def _check_length(source: Source, options: QuantizeOptions) -> None:
    longest = source.config.get("max_position_embeddings")
    if options.calibration and isinstance(longest, int) and options.sequence_length > longest:
        raise ConfigError(
            f"--sequence-length {options.sequence_length} is more than the model's {longest} positions: write "
            f"--sequence-length {longest} or less"
        )


def _quantize(source: Source, options: QuantizeOptions, staging: Path, out: Path) -> QuantizeReport:
    """Fill the staging folder with everything but the report, and verify it."""
    if source.format.shared_tensor is not None and (options.method != "rtn" or not source.decoder.has_experts):
        logger.info("loading llm-compressor")
        load_compressor()
    import torch

    try:
        return _write_and_verify(source, options, staging, out)
    except torch.OutOfMemoryError as error:
        less = (
            "--device cpu"
            if options.method == "rtn"
            else "a smaller --batch-size or --calibration-size, or --method rtn"
        )
        raise CheckpointError(f"the device ran out of memory while quantizing {source.name}: write {less}") from error


def _write_and_verify(source: Source, options: QuantizeOptions, staging: Path, out: Path) -> QuantizeReport:
    from qerl.checkpoint.load import check_config_fits

    device = resolve_device(options.device)
    with ExitStack() as stack:
        if source.part:
            source = stack.enter_context(text_model(source, out, rows=options.calibration is not None))
        else:
            check_config_fits(source.folder, source.tensors, options.trust_remote_code)
        read = stack.enter_context(TensorReader(source.tensors))
        rows = _rows(source, options, device)
        groups, rescaled = _groups(source, options, read, rows, device)
        progress = stack.enter_context(progress_bar())
        inputs: dict[str, torch.Tensor] = {}
        if options.activations == "static":
            task = progress.add_task("calibrating activations", total=len(source.groups()) - 2)
            inputs = streamed_input_scales(source, read, rows.sequences, device, lambda: progress.advance(task))
            groups = with_input_scales(groups, inputs)
        steps = len(source.groups())
        written = write_weights(staging, progress.track(groups, total=steps, description="quantizing"))
        copied = copy_small_files(source.folder, staging, code="auto_map" in source.config)
        write_json(staging / "config.json", {**source.config, "quantization_config": _config(source, options)})
        stack.enter_context(kept_if_calibrated(options.method, staging, out))
        task = progress.add_task("verifying", total=len(source.tensors))
        rounds = options.method == "rtn"
        layers = verify(staging, source, rescaled or read, device, lambda: progress.advance(task), rounds)
        check_input_scales(staging, inputs)
        activations = read_activations(staging, source.format) if source.format.four_bit_inputs else {}
        report = replace(_report(source, options, out, layers), bytes_after=written, copied_files=copied)
        if rows is not None:
            task = progress.add_task("measuring", total=len(source.groups()) - 2)
            decoded = stack.enter_context(TensorReader(read_tensors(staging)))
            checkpoints = Checkpoints(read, rescaled, decoded, options.global_scale, rounds, activations)
            outputs = measure_outputs(source, checkpoints, rows.measured(), device, lambda: progress.advance(task))
            report = replace(report, calibration=rows.summary(), outputs=outputs)
            write_json(staging / REPORT, report.to_json())
            judge(outputs, source.format.min_sqnr_db)
    return report


def _config(source: Source, options: QuantizeOptions) -> dict:
    return source.format.quantization_config(source.unquantized(), options.activations)


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
        sqnr_reference=COMPARED_WITH[options.method],
        layers=layers,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: package_version(package) for package in PACKAGES},
    )


def _rows(source: Source, options: QuantizeOptions, device: torch.device) -> Calibration | None:
    """The rows to calibrate on and to measure on; None if none were given."""
    from qerl.checkpoint.load import load_tokenizer

    if options.method != "rtn":
        check_device(device)
    if options.calibration is None:
        return None
    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    size = options.calibration_size if options.uses_rows else 0
    return load_calibration(options.calibration, tokenizer, size, options.sequence_length, HELD_OUT)


def _groups(
    source: Source, options: QuantizeOptions, read: TensorReader, rows: Calibration | None, device: torch.device
) -> tuple[Iterator[dict[str, torch.Tensor]], ReadTensor | None]:
    """The tensors to write, and where AWQ rescales the source, what it makes of it."""
    if source.format.shared_tensor is None:
        return packed_groups(source, read, device), None
    if options.method == "rtn" and options.global_scale == "pow2":
        return packed_groups(source, read, device, power_of_two_scale_of()), None
    if options.method == "rtn" and source.decoder.has_experts:
        # llm-compressor's converter knows gate and up by the names of an MLP alone, and would scale those of an expert
        # apart (llmcompressor 0.14). Our reference writes the same bits otherwise.
        return packed_groups(source, read, device), None
    config = make_config(source.format, source.unquantized())
    if options.method == "rtn":
        return rtn_groups(source, config, read, device), None
    from qerl.checkpoint.load import load_tokenizer

    logger.info("calibrating on %d x %d tokens", len(rows.sequences), len(rows.sequences[0]))
    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    model = calibrate(source, tokenizer, rows, Recipe(options.method, options.global_scale, options.batch_size))
    rescaled = partial(dense_tensor, source, model) if options.method == "awq" else None
    return calibrated_groups(source, config, model), rescaled


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


def progress_bar() -> Progress:
    """A progress bar on stderr."""
    from rich.progress import MofNCompleteColumn, Progress

    from qerl.printable import SafeConsole

    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=SafeConsole(stderr=True))


def package_version(package: str) -> str:
    """The installed version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
