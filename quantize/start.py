"""`qerl quantize --start-of FOLDER --model ORIGINAL`: the start of an NVFP4 folder that exists already.

    qerl quantize --model Qwen/Qwen2.5-7B-Instruct --start-of checkpoints/Qwen2.5-7B-Instruct-NVFP4A16
    qerl quantize --model ORIGINAL --start-of someone/Model-NVFP4 --out starts/Model      # beside the hub's cache

The original's rows go through it as in a quantization (`one_pass.py`), and the factors approximate its weights minus
the folder's. The folder has to hold the original's weights, quantized: its other tensors are the same (AWQ and
SmoothQuant move scales into norms), and its linears are near the original's.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from rich.table import Table

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.activations import read_activations
from qerl.checkpoint.base_start import START
from qerl.checkpoint.hub import is_hub_id
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.output import check_space, check_target, staged_folder
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.checkpoint.source import Source, Tensors, read_source
from qerl.checkpoint.verify import ReadTensor, sqnr_db
from quantize.one_pass import Start, one_pass_groups, read_factors, save_start, start_bytes
from quantize.options import QuantizeOptions
from quantize.output_error import Checkpoints, OutputErrors, measure_outputs
from quantize.report import output_rows, start_row, table_of
from quantize.run import START_RANK, Choice, calibration_rows, choose, progress_bar, resolve_device

USED = ("calibration", "calibration_size", "sequence_length", "start_rank", "start_of", "trust_remote_code", "device")
USED += ("overwrite", "force", "batch_size")
LEAST_SQNR_DB = 3.0  # GPTQ can leave less than rounding's 20 dB, another model's weights leave about 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartReport:
    """What was written, where, and how near the folder is to its original with it."""

    out: Path
    base: str
    source: str
    start: dict
    outputs: OutputErrors
    seconds: float

    def table(self) -> Table:
        """A short table for the terminal."""
        rows = {"base": self.base, "model": self.source, "written to": str(self.out), "start": start_row(self.start)}
        rows |= {**output_rows(self.outputs), "time": f"{self.seconds:.1f} s"}
        return table_of("start of a quantized model", rows)


def make_start(base: str, model: str, out: Path | None, options: QuantizeOptions) -> StartReport:
    """Write the start of the NVFP4 `base` (folder or hub id), made from `model`, into `out`; default: start/ in it.

    Raises ConfigError and CheckpointError; after any error `out` is as it was before.
    """
    started = time.perf_counter()
    _check_options(options)
    ref = resolve_model(base, start="none")
    if not formats.get(ref.format).takes_start or ref.adapter is not None:
        raise CheckpointError(f"--start-of {base} is not an NVFP4 folder without an adapter: give one")
    source = read_source(model, trust_remote_code=options.trust_remote_code)
    if source.part:
        raise CheckpointError(
            f"{model} is for pictures as well, of which --start-of has no text part: quantize it again without "
            "--calibration none, which makes the start beside the weights"
        )
    folder = local_folder(ref.base, options.trust_remote_code)
    source = _with_linears_of(folder, base, source)
    target = _target(folder, base, source.folder, out, options)
    device = resolve_device(options.device)
    rank = START_RANK if options.start_rank is None else options.start_rank
    choice = choose(source, replace(options.chosen(), start_rank=rank), device)
    check_space(target, start_bytes(source, choice.options.start_rank))
    logger.info("computing the start of %s from %s into %s", base, source.name, target)
    with staged_folder(target) as staging:
        start, outputs = _compute(source, folder, base, choice, device, staging)
    return StartReport(target, base, source.name, start, outputs, round(time.perf_counter() - started, 3))


def _check_options(options: QuantizeOptions) -> None:
    options.check()
    for each in fields(options):
        if each.name not in USED and getattr(options, each.name) != each.default:
            option = f"--{each.name.replace('_', '-')}"
            raise ConfigError(f"{option} is for quantizing, and --start-of takes a folder as it is: leave it out")
    if options.start_rank == 0 or not options.has_rows:
        raise ConfigError("--start-of computes a start from rows: leave out --start-rank 0 and --calibration none")


def _with_linears_of(folder: Path, base: str, source: Source) -> Source:
    """The original with the folder's packed linears as those that are quantized."""
    packed = set(source.format.quantized_linears(read_tensors(folder)))
    shapes = {name: info.shape for name, info in read_tensors(folder).items()}
    for module in packed:
        parts = {part: shapes[f"{module}.{part}"] for part in source.format.tensors}
        info = source.tensors.get(f"{module}.weight")
        if info is None or info.shape != source.format.dense_shape(parts):
            raise _another(base, source, module)
    linears = source.decoder.linears()
    quantized = tuple(module for module in linears if module in packed)
    return replace(source, quantized=quantized, kept=tuple(module for module in linears if module not in packed))


def _target(folder: Path, base: str, source: Path, out: Path | None, options: QuantizeOptions) -> Path:
    """Where the start goes. Raises CheckpointError for the hub's cache, and for one that is there."""
    from huggingface_hub import constants

    cached = is_hub_id(base) or Path(constants.HF_HUB_CACHE).resolve() in folder.resolve().parents
    if out is None and cached:
        raise CheckpointError(f"{base} is in the hub's cache, which qerl does not write to: write --out FOLDER as well")
    target = folder / START if out is None else Path(out).expanduser()
    check_target(target, source, options.overwrite, options.force)
    return target


def _compute(
    source: Source, folder: Path, base: str, choice: Choice, device: torch.device, staging: Path
) -> tuple[dict, OutputErrors]:
    """Fill the staging folder; returns the start's entry for reports, and the errors with and without it."""
    options = choice.options
    with ExitStack() as stack:
        read = stack.enter_context(TensorReader(source.tensors))
        written = stack.enter_context(TensorReader(read_tensors(folder)))
        _check_others(source, base, read, written)
        rows = calibration_rows(source, choice)
        progress = stack.enter_context(progress_bar())
        start = Start(options.start_rank)

        def packed(names: Sequence[str], weights: Mapping[str, torch.Tensor], moments: object) -> Tensors:
            found = {
                f"{source.chosen[name]}.{part}": written(f"{source.chosen[name]}.{part}")
                for name in names
                if name in source.chosen
                for part in source.format.tensors
            }
            _check_near(source, base, weights, found)
            return found

        groups = one_pass_groups(source, read, rows.sequences, device, packed, start)
        for _ in progress.track(groups, total=len(source.groups()), description="computing"):
            pass
        entry = save_start(folder, source, start, rows, staging)
        task = progress.add_task("measuring", total=len(source.groups()) - 2)
        activations = read_activations(folder, source.format)
        factors = read_factors(staging)
        checkpoints = Checkpoints(read, None, written, "amax", False, activations, factors)
        outputs = measure_outputs(source, checkpoints, rows, device, lambda: progress.advance(task))
    return entry, outputs


def _check_others(source: Source, base: str, read: ReadTensor, written: ReadTensor) -> None:
    """Raise CheckpointError unless the norms and biases are the original's, to the bit in the folder's dtype."""
    for name, info in source.tensors.items():
        if len(info.shape) == 1:
            there = written(name)
            if not torch.equal(read(name).to(there.dtype), there):
                raise CheckpointError(
                    f"{base} has another {name} than {source.name}: its method moved scales into it (AWQ, SmoothQuant) "
                    "or it was made from another model, so that there is no start for it"
                )


def _check_near(source: Source, base: str, weights: Mapping[str, torch.Tensor], packed: Tensors) -> None:
    """Raise CheckpointError for a linear that is not the original's, quantized."""
    for name in (name for name in weights if name in source.chosen):
        module = source.chosen[name]
        parts = {part: packed[f"{module}.{part}"].to(weights[name].device) for part in source.format.tensors}
        value = sqnr_db(weights[name].float(), source.format.dequantize(parts, torch.float32))
        if value is not None and value < LEAST_SQNR_DB:
            raise _another(base, source, module)


def _another(base: str, source: Source, module: str) -> CheckpointError:
    return CheckpointError(
        f"{base} was not made from {source.name} ({module} differs): give the 16-bit model that it was made from as "
        "--model"
    )
