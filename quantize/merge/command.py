"""`qerl merge`; qerl/cli/main.py registers it. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.base.errors import ConfigError
from qerl.cli.options import Gpu
from quantize.merge.options import MergeOptions

if TYPE_CHECKING:
    from quantize.merge.report import MergeReport


def merge_command(options: MergeOptions, gpu: Gpu = None) -> None:
    """Turn an adapter into a folder to publish: a PEFT adapter, a merged BF16 model, or a merged NVFP4 model.

    Prints how much of the adapter is left after rounding, and how to serve the result.
    """
    from qerl.base.printable import SafeConsole
    from qerl.cli.next_step import say_next

    report = merged(options, gpu)
    console = SafeConsole()
    console.print(report.table())
    first, *others = report.commands.values()
    say_next(first)
    for command in others:
        console.print(f"or: {command}", soft_wrap=True, highlight=False, markup=False)


def merged(options: MergeOptions, gpu: int | None = None) -> MergeReport:
    """The report of the adapter merged on one card, or on the CPU."""
    from qerl.base.devices import choose_card
    from quantize.merge.run import merge

    if options.device in ("auto", "cuda"):
        choose_card(gpu=gpu)
    elif gpu is not None:
        raise ConfigError(f"--gpu {gpu} and --device {options.device} name two devices: leave one of them out")
    return merge(options)
