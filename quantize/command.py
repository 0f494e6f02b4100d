"""`qerl quantize`; qerl/cli/main.py registers it. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl.base.errors import ConfigError
from qerl.cli.options import Gpu
from quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from quantize.report import QuantizeReport
    from quantize.start_of import StartReport


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

    report = quantized(model, out, gpu, options)
    SafeConsole().print(report.table())
    if options.start_of is None:
        say_next(after_quantizing(report.out))


def quantized(model: str, out: Path | None, gpu: int | None, options: QuantizeOptions) -> QuantizeReport | StartReport:
    """The report of the model quantized on one card, or on the CPU; with `start_of` that of a start."""
    from qerl.base.devices import choose_card
    from qerl.base.threads import choose_threads

    if options.device in ("auto", "cuda"):
        choose_card(gpu=gpu)
    elif gpu is not None:
        raise ConfigError(f"--gpu {gpu} and --device {options.device} name two devices: leave one of them out")
    choose_threads(model)
    if options.start_of is not None:
        from quantize.start_of import make_start

        return make_start(options.start_of, model, out, options)
    from quantize.run import quantize_checkpoint

    return quantize_checkpoint(model, out, options)
