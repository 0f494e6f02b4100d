"""`qerl export`; qerl/cli/main.py registers it. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantize.export.options import ExportOptions

if TYPE_CHECKING:
    from quantize.export.run import ExportReport


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
    from quantize.export.run import export

    if ":" not in options.device:
        choose_card()
    return export(options)
