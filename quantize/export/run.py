"""`qerl export` from its options to its report.

What is asked of `qerl export`, as one value whose fields are its options. Importing this loads no torch.

Open an exported model again and compare it bit by bit with what the masters give once more.

The README.md of an exported model: a model card in the hub's format, from the run and what was written.

`qerl export`: write the model that a run has trained through the quantizer.

    qerl export --run runs/qat_7b-20260101                    # -> exported/qat_7b-20260101-nvfp4
    qerl export --run R --to bf16                             # the masters, rounded to bfloat16
    qerl export --run R --step 40 --out DIR                   # an earlier checkpoint
    qerl export --run R --push-to-hub me/name                 # uploaded, with its model card

First everything is refused that the files' headers (and the hub, before a push) show to be impossible. Then one layer
at a time is packed by the format's own arithmetic, under the global scales of RUN/base, into a hidden folder. It is
opened again, compared bit by bit with what the masters give, and moved to its place in one step.

`qerl export`; qerl/cli/main.py registers it. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import no_folder
from qerl.checkpoint import adapter_file as sealed
from qerl.checkpoint.adapter_file import BASE, checkpoint_of, through_quantizer
from qerl.checkpoint.export import Masters, check_push, dense_tensors, packed_tensors, push, read_trained, write_trained
from qerl.checkpoint.folder import REPORT, format_of, kind_of
from qerl.checkpoint.output import EXPORT_REPORT, check_space, check_target, staged_folder, write_json
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_json, read_tensors
from qerl.checkpoint.source import Tensors, by_layer
from qerl.checkpoint.verify import FailedCheck, check_head, sqnr_db
from quantize.merge.card import (
    base_on_hub,
    evaluation_text,
    licence_of,
    loading_lines,
    read_results,
    table_text,
    training_text,
)
from quantize.merge.options import ONLY_QERL, chat_line, only_qerl_reads, serve_model_line
from quantize.report import format_size
from quantize.run import package_version, progress_bar, resolve_device

if TYPE_CHECKING:
    import torch
    from rich.table import Table


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


def check_written(
    masters: Masters, folder: Path, device: torch.device, track: Callable = iter, dense: bool = False
) -> float | None:
    """Compare the model in `folder` with `masters`, whose linears it holds packed or, if `dense`, in bfloat16.

    Returns the lowest SQNR of its trained weights to their masters, in dB; None if all are exact. Raises FailedCheck.
    """
    if format_of(folder).quantized == dense:
        raise FailedCheck(f"config.json says that it is {format_of(folder).label}")
    check_head(folder)
    found, lowest = read_tensors(folder), math.inf
    left = set(found)
    with TensorReader(found) as read, masters.reader() as wide:
        for group in track(dense_tensors(masters) if dense else packed_tensors(masters, device)):
            for name, tensor in group.items():
                if name not in left:
                    raise FailedCheck(f"{name} is missing")
                _check_same(name, read(name), tensor)
            left -= group.keys()
            for name, weight in _weights(masters, group):
                lowest = min(lowest, sqnr_db(wide(name).float(), weight) or math.inf)
    if left:
        raise FailedCheck(f"{min(left)} is unexpected")
    return lowest if math.isfinite(lowest) else None


def _check_same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not same or not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
        raise FailedCheck(f"{name} is not the tensor that was to be written")


def _weights(masters: Masters, group: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights in a group as they will be multiplied by, in float32."""
    import torch

    format = masters.format
    for name in group:
        module, _, part = name.rpartition(".")
        weight = f"{module}.weight"
        parts = {each: group.get(f"{module}.{each}") for each in format.tensors}
        if weight in masters.trained and part == format.tensors[0] and None not in parts.values():
            yield weight, format.dequantize(parts, torch.float32)  # its codes may be named `weight`, too
        elif name in masters.trained:
            yield name, group[name].float()


def card_text(report: ExportReport, run: Path) -> str:
    """The model card: metadata and text."""
    from huggingface_hub import ModelCardData

    licence = licence_of(report.begun_from)
    data = ModelCardData(
        base_model=base_on_hub(report.begun_from),
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["qerl", "grpo", "qat", *formats.get(report.to).card_tags],
    )
    rows = {
        "what": formats.get(report.to).model_label,
        **report.rows(),
        "run": f"`{Path(report.run).name}`, step {report.step}",
        "begun from": f"`{base_on_hub(report.begun_from) or Path(report.begun_from).name}`",
        "licence": f"{licence} (the base's)" if licence else "that of the base model, which its folder does not state",
        "made": f"{report.created} by `qerl export --to {report.to}`",
    }
    results = read_results(run)
    parts = [f"# {report.out.name}\n\n{table_text(rows)}", loading_lines(report.out, report.commands.values())]
    parts.append(training_text(run))
    if results:
        parts.append(evaluation_text(results, "the finished run"))
    parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f"---\n{data.to_yaml().strip()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


PACKAGES = ("qerl", "torch", "transformers", "compressed-tensors")
CARD = "README.md"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The result of `export`: `export_report.json` beside the weights, and a short table for the terminal."""

    out: Path
    to: str
    run: str
    step: int
    begun_from: str  # the 16-bit model
    quant_cfg: str | None  # digest of the run's, for a packed model
    linears: int  # trained
    trained: str  # masters, or 16-bit weights with the adapter
    bytes: int
    created: str
    versions: dict[str, str]
    commands: dict[str, str]
    lowest_sqnr_db: float | None = None  # of the written linears to their masters; None if all are exact

    def to_json(self) -> dict:
        """The content of export_report.json."""
        return {name: value for name, value in asdict(self).items() if name != "out"}

    def rows(self) -> dict[str, str]:
        """What the result is, by the names that people read."""
        rows = {
            "run": f"{self.run}, step {self.step}",
            "begun from": self.begun_from,
            "weights": f"{self.linears} trained linears, {self._how()}",
        }
        if self.lowest_sqnr_db is not None:
            rows[f"beside the {self.trained}"] = f"at least {self.lowest_sqnr_db:.1f} dB"
        return rows

    def table(self) -> Table:
        """The same for the terminal."""
        from rich.table import Table

        table = Table(title=formats.get(self.to).model_label, show_header=False, title_justify="left")
        for name, text in {**self.rows(), "written to": f"{self.out} ({format_size(self.bytes)})"}.items():
            table.add_row(name, text)
        return table

    def _how(self) -> str:
        if formats.get(self.to).quantized:
            return "packed as the engine holds them"
        return f"the {self.trained} rounded to bfloat16, which is not the model that was sampled from"


def export(options: ExportOptions) -> ExportReport:
    """Export as `options` say. Raises ConfigError or CheckpointError.

    After an error `out` is as it was before; after one of the push it is complete.
    """
    options.check()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    run = options.run.expanduser()
    step, masters = _read(run, options)
    options = options.of(masters.format.name)
    out = options.folder().expanduser()
    dense = not formats.get(options.to).quantized
    check_target(out, run / BASE, options.overwrite, options.force)
    check_target(out, run / "checkpoints", options.overwrite, options.force)
    check_space(out, masters.output_bytes(dense))
    device = resolve_device(options.device)
    logger.info("exporting step %d of %s to %s", step, run, out)
    report = _report(run, out, step, masters, options)
    layers = len(by_layer(masters.tensors))
    with staged_folder(out) as staging, progress_bar() as progress:
        track = partial(progress.track, total=layers)
        size = write_trained(masters, staging, device, partial(track, description="writing"), dense)
        lowest = check_written(masters, staging, device, partial(track, description="verifying"), dense)
        report = replace(report, bytes=size, lowest_sqnr_db=lowest)
        _write_texts(report, run, staging)
        sealed.seal(staging)
    logger.info("wrote %s", out)
    if _only_qerl(run, options):
        logger.warning("warning: %s: %s", out, ONLY_QERL)
    if options.push_to_hub:
        logger.info("pushed to %s", push(out, options.push_to_hub, not options.public, "export"))
    return report


def _read(run: Path, options: ExportOptions) -> tuple[int, Masters]:
    """(step, masters) of the checkpoint to export. Raises QerlError for what does not train through the quantizer."""
    if not run.is_dir():
        raise CheckpointError(f"--run {run}: {no_folder(str(run))}: give one that `qerl train` made (runs/NAME)")
    if kind_of(run) != "run":
        raise CheckpointError(f"--run {run} is no run directory: give one that `qerl train` made (runs/NAME)")
    if not through_quantizer(run):
        raise CheckpointError(
            f"{run} trains an adapter beside its base: write `qerl merge --adapter {run} --to "
            f"{options.to or formats.DEFAULT.name}`"
        )
    step, checkpoint = checkpoint_of(run, options.step)
    if damage := sealed.damage_of(run / BASE, {"config.json"}):
        raise CheckpointError(
            f"{run / BASE}, whose scales the weights are packed by, is damaged ({damage}): put its files back; a run "
            f"that has steps left makes it again, `qerl train --resume {run}`"
        )
    masters = read_trained(run, checkpoint)
    if options.to and formats.get(options.to).quantized and options.to != masters.format.name:
        raise ConfigError(
            f"--to {options.to}: {run} trains {masters.format.label} weights: write {masters.format.name}"
        )
    return step, masters


def _report(run: Path, out: Path, step: int, masters: Masters, options: ExportOptions) -> ExportReport:
    made = read_json(run / BASE / REPORT)
    return ExportReport(
        out=out,
        to=options.to,
        run=str(run),
        step=step,
        begun_from=str(made.get("source")),
        quant_cfg=made.get("quant_cfg"),
        linears=sum(len(info.shape) == 2 for info in masters.trained.values()),
        trained=masters.what,
        bytes=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: package_version(package) for package in PACKAGES},
        commands={"chat": chat_line(out), **({} if _only_qerl(run, options) else {"vllm": serve_model_line(out)})},
    )


def _only_qerl(run: Path, options: ExportOptions) -> bool:
    return formats.get(options.to).quantized and only_qerl_reads(run / BASE)


def _write_texts(report: ExportReport, run: Path, folder: Path) -> None:

    write_json(folder / EXPORT_REPORT, report.to_json())
    (folder / CARD).write_text(card_text(report, run), encoding="utf-8")


def export_command(options: ExportOptions) -> None:
    """Write the model of a run that trains through the quantizer: as it was trained, or in bfloat16 without rounding.

    Packed, the bytes are those that the engine sampled from after its sync. Prints how to serve the result.
    """
    from qerl.base.printable import SafeConsole

    report = exported(options)
    console = SafeConsole()
    console.print(report.table())
    for command in report.commands.values():
        console.print(command, soft_wrap=True, highlight=False, markup=False)


def exported(options: ExportOptions) -> ExportReport:
    """The report of the model exported on one card, or on the CPU."""
    from qerl.base.devices import choose_card

    if ":" not in options.device:
        choose_card()
    return export(options)
