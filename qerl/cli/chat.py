"""`qerl chat`; qerl/cli/main.py registers it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from qerl.cli.columns import parse_switches
from qerl.cli.from_dataclass import Text
from qerl.cli.option_names import Gpu


@dataclass(frozen=True)
class ChatOptions:
    """What is asked of `qerl chat`, whose options these are."""

    model: Annotated[str, typer.Option(help="Base, merged model, NVFP4 folder, adapter, run, hub id, or `tiny`.")]
    adapter: Annotated[str | None, typer.Option(help="Adapter folder or run to apply to the model.")] = None
    system_prompt: Annotated[str | None, typer.Option(help="System message; default: none.")] = None
    chat_template_kwargs: Annotated[
        Mapping[str, object] | None,
        Text(parse_switches),
        typer.Option(help="Variables of the chat template: enable_thinking=false. Default: those that trained."),
    ] = None
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 is off.")] = 0.95
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0
    engine: Annotated[str, typer.Option(help="auto (vllm on a GPU), transformers or vllm.")] = "auto"
    kernel: Annotated[str, typer.Option(help="NVFP4 kernel of vllm: auto, qerl, humming or marlin.")] = "auto"
    memory: Annotated[
        float | None,
        typer.Option(min=0, help="GPU budget of vllm: GiB, or up to 1 a share of the card. Default: what is left."),
    ] = None
    cap_gib: Annotated[
        float | None, typer.Option(min=0, help="The process takes no more GPU memory than this (vllm). Default: all.")
    ] = None
    gpu: Gpu = None


def chat_command(options: ChatOptions) -> None:
    """Talk to a model on the engine that trains and evaluates; lines of a pipe are messages too."""
    from qerl.base.devices import choose_card
    from qerl.base.threads import choose_threads
    from qerl.cli.conversation import OPTIONS, chat
    from qerl.cli.option_names import options_named

    choose_card(gpu=options.gpu)
    choose_threads(options.model)
    with options_named(OPTIONS):
        chat(options)
