"""`qerl export`: write the model that a run has trained through the quantizer.

    qerl export --run runs/qat_7b-20260101                    # -> exported/qat_7b-20260101-nvfp4
    qerl export --run R --to bf16                             # the masters, rounded to bfloat16
    qerl export --run R --step 40 --out DIR                   # an earlier checkpoint
    qerl export --run R --push-to-hub me/name                 # uploaded, with its model card

First everything is refused that the files' headers (and the hub, before a push) show to be impossible. Then one layer
at a time is packed by the format's own arithmetic, under the global scales of RUN/base, into a hidden folder. It is
opened again, compared bit by bit with what the masters give, and moved to its place in one step.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import no_folder
from qerl.checkpoint import adapter_file as sealed
from qerl.checkpoint.adapter_file import BASE, checkpoint_of, through_quantizer
from qerl.checkpoint.export import Masters, check_push, push, read_trained, write_trained
from qerl.checkpoint.folder import REPORT, kind_of
from qerl.checkpoint.output import EXPORT_REPORT, check_space, check_target, staged_folder, write_json
from qerl.checkpoint.shards import read_json
from qerl.checkpoint.source import by_layer
from quantize.export.check import check_written
from quantize.export.options import ExportOptions
from quantize.merge.serve import ONLY_QERL, chat_line, only_qerl_reads, serve_model_line
from quantize.report import format_size
from quantize.run import package_version, progress_bar, resolve_device

if TYPE_CHECKING:
    from rich.table import Table

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
    from quantize.export.card import card_text

    write_json(folder / EXPORT_REPORT, report.to_json())
    (folder / CARD).write_text(card_text(report, run), encoding="utf-8")
