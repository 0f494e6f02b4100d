"""`qerl export`; qerl/cli.py registers it. Nothing here imports torch."""

from __future__ import annotations

from quantize.export.options import ExportOptions


def export_command(options: ExportOptions) -> None:
    """Write the model of a run that trains through the quantizer: as it was trained, or in bfloat16 without rounding.

    Packed, the bytes are those that the engine sampled from after its sync. Prints how to serve the result.
    """
    from qerl.devices import choose_card
    from qerl.printable import SafeConsole
    from quantize.export.run import export

    if ":" not in options.device:
        choose_card()
    report = export(options)
    console = SafeConsole()
    console.print(report.table())
    for command in report.commands.values():
        console.print(command, soft_wrap=True, highlight=False, markup=False)
