"""`qerl quantize`: turn a 16-bit checkpoint into an NVFP4 one (NVFP4A16) in the format of compressed-tensors.

    qerl quantize --model Qwen/Qwen2.5-7B-Instruct                          # checkpoints/Qwen2.5-7B-Instruct-NVFP4A16
    qerl quantize --model M --method awq --calibration rows.jsonl           # 256 x 2048 tokens, as the paper does
    qerl quantize --model M --global-scale pow2                             # scales that may stay while weights change
    qerl quantize --model M --ignore 're:.*self_attn.*' --out ffn-only      # feed-forward layers only

First everything is refused that the files' headers show to be impossible. Then the tensors stream through
llm-compressor into a hidden folder, which is opened again, verified, and moved to its place in one step.

Departure from the paper (arXiv 2510.11696), which quantizes with AWQ: the default is rounding to nearest, which needs
no data, and which the paper's published code does too. `--method awq` is the paper's recipe.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.output import check_space, check_target, staged_folder
from qerl.checkpoint.packed import packed_groups, power_of_two_scale_of
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.resolve import REPORT, default_quantized_dir
from qerl.checkpoint.source import Source, read_source
from qerl.checkpoint.verify import LayerCheck, ReadTensor, verify
from qerl.checkpoint.writer import copy_small_files, write_json, write_weights
from qerl.errors import CheckpointError, ConfigError
from qerl.formats.scheme import config_entry, make_config
from quantize.calibrated import Recipe, calibrate, calibrated_groups, check_device, dense_tensor
from quantize.calibration import Calibration, load_calibration
from quantize.compressor import SCHEME, check_installed, load_compressor
from quantize.options import QuantizeOptions
from quantize.report import QuantizeReport
from quantize.rtn import rtn_groups

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress
    from transformers import PreTrainedModel

PACKAGES = ("qerl", "llmcompressor", "compressed-tensors", "transformers", "torch")
COMPARED_WITH = {"rtn": "the source", "awq": "the source after AWQ's rescaling", "gptq": "the source"}

logger = logging.getLogger(__name__)


def quantize_checkpoint(model: str, out: Path | None = None, options: QuantizeOptions | None = None) -> QuantizeReport:
    """Quantize `model` (folder, hub id or `tiny`) into `out`, default `checkpoints/<name>-NVFP4A16`, and verify it.

    Raises ConfigError for wrong options, CheckpointError for the model or the folder, DataError for calibration rows,
    and MissingExtraError without llm-compressor. After any error `out` is as it was before.
    """
    started = time.perf_counter()
    options = options or QuantizeOptions()
    options.check()
    check_installed()
    out = default_quantized_dir(model) if out is None else Path(out).expanduser()
    source = read_source(model, options.ignore, options.trust_remote_code)
    check_target(out, source.folder, options.overwrite)
    check_space(out, source.output_bytes())
    _check_length(source, options)
    logger.info("quantizing %s to %s: %s by %s", source.name, out, SCHEME, options.method)
    with staged_folder(out) as staging:
        report = _quantize(source, options, staging, out)
        report = replace(report, seconds=round(time.perf_counter() - started, 3))
        write_json(staging / REPORT, report.to_json())
    logger.info("wrote %s in %.1f s", out, report.seconds)
    return report


def _check_length(source: Source, options: QuantizeOptions) -> None:
    longest = source.config.get("max_position_embeddings")
    if options.method != "rtn" and isinstance(longest, int) and options.sequence_length > longest:
        raise ConfigError(
            f"--sequence-length {options.sequence_length} is more than the model's {longest} positions: write "
            f"--sequence-length {longest} or less"
        )


def _quantize(source: Source, options: QuantizeOptions, staging: Path, out: Path) -> QuantizeReport:
    """Fill the staging folder with everything but the report, and verify it."""
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

    check_config_fits(source.folder, source.tensors, options.trust_remote_code)
    device = resolve_device(options.device)
    config = make_config(source.format, ["lm_head", *source.kept])
    with ExitStack() as stack:
        read = stack.enter_context(TensorReader(source.tensors))
        dense: ReadTensor = read
        calibration = None
        if options.method == "rtn":
            if options.global_scale == "pow2":
                groups = packed_groups(source, read, device, power_of_two_scale_of())
            else:
                groups = rtn_groups(source, config, read, device)
        else:
            model, calibration = _calibrated(source, options, device)
            groups = calibrated_groups(source, config, model)
            if options.method == "awq":
                dense = partial(dense_tensor, source, model)
        progress = stack.enter_context(progress_bar())
        steps = len(source.groups())
        written = write_weights(staging, progress.track(groups, total=steps, description="quantizing"))
        copied = copy_small_files(source.folder, staging, code="auto_map" in source.config)
        write_json(staging / "config.json", {**source.config, "quantization_config": config_entry(config)})
        task = progress.add_task("verifying", total=len(source.tensors))
        layers = verify(staging, source, dense, device, lambda: progress.advance(task))
    report = _report(source, options, out, layers)
    return replace(
        report, bytes_after=written, copied_files=copied, calibration=calibration.summary() if calibration else None
    )


def _report(source: Source, options: QuantizeOptions, out: Path, layers: list[LayerCheck]) -> QuantizeReport:
    return QuantizeReport(
        out=out,
        source=source.name,
        method=options.method,
        global_scale=options.global_scale,
        scheme=SCHEME,
        ignore=options.ignore,
        kept_linears=source.kept,
        bytes_before=source.size_bytes(),
        sqnr_reference=COMPARED_WITH[options.method],
        layers=layers,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: package_version(package) for package in PACKAGES},
    )


def _calibrated(source: Source, options: QuantizeOptions, device: torch.device) -> tuple[PreTrainedModel, Calibration]:
    from qerl.checkpoint.load import load_tokenizer

    check_device(device)
    tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
    calibration = load_calibration(options.calibration, tokenizer, options.calibration_size, options.sequence_length)
    summary = calibration.summary()
    logger.info("calibrating on %d x %d tokens", summary["sequences"], summary["sequence_length"])
    recipe = Recipe(options.method, options.global_scale, options.batch_size)
    return calibrate(source, tokenizer, calibration, recipe), calibration


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
