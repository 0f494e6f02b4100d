"""`qerl quantize`, and `qerl export` with its alias `qerl merge`. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl.cli.options import Gpu
from quantize.export.options import ExportOptions
from quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from quantize.export.report import ExportReport, MergeReport


def quantize_command(
    *,
    model: Annotated[str, typer.Option(help="Folder, hub id, or `tiny` (the model that ships with qerl).")],
    out: Annotated[Path | None, typer.Option(help="Default: checkpoints/<name>-<SCHEME>.")] = None,
    gpu: Gpu = None,
    options: QuantizeOptions,
) -> None:
    """Turn a 16-bit checkpoint into NVFP4 (4-bit weights) or FP8 (8-bit weights), and verify it."""
    from qerl.base.printable import SafeConsole
    from qerl.cli.next_step import after_quantizing, say_next
    from quantize.run import quantized

    report = quantized(model, out, gpu, options)
    SafeConsole().print(report.table())
    if options.start_of is None:
        say_next(after_quantizing(str(report.out)))


def export_command(options: ExportOptions, gpu: Gpu = None) -> None:
    """Turn a run or an adapter into a folder to serve or publish: a PEFT adapter, or a whole model in 16, 8 or 4 bits.

    What a run trained through the quantizer is written with the bytes that the engine sampled from. An adapter beside
    its base is merged; the report says how much of it is left after rounding. Prints how to serve the result.
    """
    from quantize.export.run import exported

    _show(exported(options, gpu))


def merge_command(options: ExportOptions, gpu: Gpu = None) -> None:
    """The same as `qerl export`, into merged/ unless --out says otherwise."""
    from quantize.export.run import merged

    _show(merged(options, gpu))


def _show(report: ExportReport | MergeReport) -> None:
    from qerl.base.printable import SafeConsole
    from qerl.cli.next_step import say_next

    console = SafeConsole()
    console.print(report.table())
    first, *others = report.commands.values()
    say_next(first)
    for command in others:
        console.print(f"or: {command}", soft_wrap=True, highlight=False, markup=False)
