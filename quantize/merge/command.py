"""The options of `qerl merge`; qerl/cli.py registers `merge_command`. Nothing here imports torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Target = StrEnum("Target", [(name, name) for name in ("adapter", "bf16", "nvfp4")])
Onto = StrEnum("Onto", [(name, name) for name in ("auto", "trained", "original")])
AdapterDtype = StrEnum("AdapterDtype", [(name, name) for name in ("keep", "bfloat16", "float32")])

MEASURE, PUBLISH = "What is left of the adapter", "Publish"


def merge_command(
    adapter: Annotated[str, typer.Option(help="Adapter folder, run directory, or hub id of an adapter.")],
    to: Annotated[Target, typer.Option(help="adapter: PEFT folder; bf16: whole model; nvfp4: whole model in 4 bits.")],
    out: Annotated[Path | None, typer.Option(help="Default: merged/<name>-<to>.")] = None,
    model: Annotated[str | None, typer.Option(help="Base, if it is not the one that the adapter names.")] = None,
    onto: Annotated[
        Onto,
        typer.Option(
            help="trained: the weights that were trained on; original: the 16-bit model behind them. "
            "auto: original for nvfp4 where it is here, else trained."
        ),
    ] = Onto.auto,
    dtype: Annotated[AdapterDtype, typer.Option(help="Of an adapter folder's tensors.")] = AdapterDtype.keep,
    base_name: Annotated[
        str | None, typer.Option(help="The base that an adapter folder names: hub id or folder.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File with a column `question`. Default: the run's own prompts.", rich_help_panel=MEASURE),
    ] = None,
    prompt_count: Annotated[
        int, typer.Option(help="Prompts to compare on; 0 leaves it out.", rich_help_panel=MEASURE)
    ] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each completion.", rich_help_panel=MEASURE)] = 128,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Upload to this hub id (owner/name).", rich_help_panel=PUBLISH)
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="A new hub repository is public; default private.", rich_help_panel=PUBLISH)
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output folder.")] = False,
    device: Annotated[str, typer.Option(help="What merges: auto, cpu or cuda.")] = "auto",
) -> None:
    """Turn an adapter into a folder to publish: a PEFT adapter, a merged BF16 model, or a merged NVFP4 model.

    Prints how much of the adapter is left after rounding, and how to serve the result.
    """
    from rich.console import Console

    from qerl.devices import choose_card
    from quantize.merge.run import MergeOptions, merge

    if ":" not in device:
        choose_card()
    report = merge(
        MergeOptions(
            adapter=adapter,
            to=str(to),
            out=out,
            model=model,
            onto=str(onto),
            dtype=str(dtype),
            base_name=base_name,
            prompts=prompts,
            prompt_count=prompt_count,
            max_new_tokens=max_new_tokens,
            push_to_hub=push_to_hub,
            private=not public,
            overwrite=overwrite,
            device=device,
        )
    )
    console = Console()
    console.print(report.table())
    for command in report.commands.values():
        console.print(command, soft_wrap=True, highlight=False, markup=False)
