"""`qerl plan`: its options and its tables. qerl/cli/main.py registers it. Nothing here imports torch."""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl import formats
from qerl.base.devices import VLLM_ATTENDS, best_card, visible_cards
from qerl.base.errors import ConfigError
from qerl.base.printable import SafeConsole
from qerl.checkpoint.activations import GRPO_WARNING
from qerl.checkpoint.folder import EMBEDDED, format_of, run_named
from qerl.checkpoint.resolve import model_under, resolve_model
from qerl.cli.train import card_values, key_values, recipe_values
from qerl.config.names import adapts_experts, expert_rank
from qerl.model.costs import takes
from qerl.plan.engine_memory import MAX_SEQUENCES, Card, card_named, card_of
from qerl.plan.sizes import KNOWN, calibrated_tokens, calibrates, calibration_seconds, read_sizes, rounds_to_four_bits
from training.preflight.advice import (
    MEAN_COMPLETION,
    Likely,
    advice,
    duration,
    hours,
    in_words,
    largest_completion,
    likely,
    share_of,
)
from training.preflight.plan import START, lacks, plan, trainee_of, validation_sentences
from training.preflight.seconds import TRAIN_RATE

if TYPE_CHECKING:
    from rich.table import Table

    from qerl.config.schema import RunConfig
    from training.preflight.plan import Plan

logger = logging.getLogger(__name__)

MEASURED = (9, 0)  # the compute capability of all cards that qerl ran on
QUANTIZED = re.compile("fp[48]", re.IGNORECASE)  # in the name of a model whose weights qerl may open as they are
DEFAULT_RECIPE = "dapo_7b"  # where only a model is named


def plan_command(
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Name (`qerl recipes`) or YAML file; with --model the default is {DEFAULT_RECIPE}.",
            autocompletion=recipe_values,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GiB (24) or card (4060, 4090, l4, a100, h200, ...); default: this machine's, or 24.",
            autocompletion=card_values,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, run, adapter, `tiny`, or a hub id whose name begins as one of a known size: "
            f"{', '.join(KNOWN)}. Default: the recipe's."
        ),
    ] = None,
    mean_completion: Annotated[
        float,
        typer.Option(
            help="Mean length of completions, of which the likely hours follow: tokens (300), or a share of "
            "rollout.max_new_tokens (0.25)."
        ),
    ] = MEAN_COMPLETION,
    gpus: Annotated[
        int, typer.Option(min=1, help="Cards that share the run, as for `qerl train`; the plan is that of one of them.")
    ] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value over the recipe, as for `qerl train`. Repeatable.", autocompletion=key_values
        ),
    ] = None,
) -> None:
    """What a run will take of a card, before anything is loaded: memory by phase, hours, and what fits."""
    from qerl.config.recipe import load_recipe

    model = None if model is None else run_named(model)
    if recipe is None:
        if model is None:
            raise ConfigError("no recipe was given: write `qerl plan --recipe NAME`, or name a model with --model")
        recipe = DEFAULT_RECIPE
        logger.info("no --recipe given: planning with %s, whose lengths are for math with long answers", recipe)
    config = load_recipe(recipe, overrides or [], base=model)
    expected = likely(config, mean_completion)
    share = share_of(config, gpus)
    made = plan_of(share, gpu, gpus=gpus)
    if gpus > 1:
        prompts = f"{share.rollout.prompts_per_step} of the {config.rollout.prompts_per_step} prompts of a step"
        SafeConsole().print(f"One of {gpus} cards, with {prompts}, and its share of validations:", soft_wrap=True)
    show(share, made, SafeConsole(), expected)
    if made.problems:
        sys.exit(1)


def plan_of(config: RunConfig, gpu: str | None = None, model: str | None = None, gpus: int = 1) -> Plan:
    """The plan for the card `gpu`. None means this machine's card, or one of 24 GiB where there is none.

    `model`: where the recipe's model was found, if that is known already. Of `gpus` cards here the smallest counts.
    """
    card = this_card(gpus) if gpu is None else card_of(gpu)
    if (lacking := lacks(config, card)) is not None:
        raise ConfigError(lacking)
    base, format = model_under(model or config.model.base), config.model.format
    if formats.get(format).quantized and base not in EMBEDDED and os.path.isdir(base):
        own = format_of(Path(base))
        if own.quantized and own.name != format:
            resolve_model(base, format)  # refuses it, and says what to write
    sizes = read_sizes(base)
    return plan(config, sizes, replace(card, ranks=gpus))


def this_card(gpus: int = 1) -> Card:
    """The card that a run would take here; of several the one with the least memory, which decides.

    That is the known card of the same name and size. If only the name is known, it has that card's speed and the memory
    that it reports (a laptop's 4090 has 16 GiB). Otherwise it is described by its memory alone.
    """
    seen = [card for card in visible_cards() if card.total_gib]
    if not seen:
        return replace(card_of("24"), name="a card of 24 GiB, as fast as 3090 (no GPU was found here)")
    found = best_card(seen) if gpus == 1 else min(seen[:gpus], key=lambda card: card.total_gib)
    if len(seen) > 1:
        logger.info("planning for card %s of %d visible ones", found, len(seen))
    gib = round(found.total_gib, 1)
    return card_named(found.name, gib) or card_of(str(gib))


def show(config: RunConfig, made: Plan, console: SafeConsole, expected: Likely) -> None:
    """Print the tables, what fits and how long it takes, or what to change if the run does not fit."""
    console.print(verdict(config, made, expected), highlight=False, soft_wrap=True)
    console.print(f"Memory on {made.card.name}", highlight=False, soft_wrap=True)
    for table in tables(made):
        console.print(table)
    lines = [*_about_name(config, made), *sentences(config, made)]
    lines += [] if made.problems else duration(config, made, expected)
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)


def verdict(config: RunConfig, made: Plan, expected: Likely) -> str:
    """Whether it fits, in one line."""
    name, limit = made.card.name, made.limit / 2**30
    if not made.found:
        likely_s, full_s = hours(config, made, expected)
        most = max(map(made.peak, made.memory)) / 2**30
        time = in_words(full_s) if likely_s is None else f"probably {in_words(likely_s)}"
        return f"Fits on {name}: at most {most:.1f} of {limit:.1f} GiB, and {time} for {config.run.steps} steps."
    first = made.found[0]
    if not first.needed:
        return f"Does not fit, because {first.text}."
    needed, left = first.needed / 2**30, first.available / 2**30
    return f"Does not fit on {name}, because it needs {needed:.1f} GiB where {left:.1f} are left."


def show_plan_at(config: RunConfig, model: str, console: SafeConsole, expected: Likely) -> bool:
    """Show the plan of a run from the folder `model`, and return whether it would fit."""
    made = plan_of(config, model=model)
    show(config, made, console, expected)
    return not made.problems


def tables(made: Plan) -> list[Table]:
    """Memory by phase and by what takes it and, for a run that fits, seconds per step by phase."""
    from rich.table import Table

    gib = 2**30
    parts = list(dict.fromkeys(part for phase in made.memory.values() for part in phase))
    memory = Table("GiB", *made.memory, box=None)
    for part in parts:
        memory.add_row(part, *(f"{phase[part] / gib:.2f}" if part in phase else "" for phase in made.memory.values()))
    memory.add_row("all", *(f"{made.peak(phase) / gib:.2f}" for phase in made.memory), style="bold")
    memory.add_row("limit", *(f"{made.limit / gib:.2f}" for _ in made.memory))
    if made.problems:
        return [memory]
    seconds = Table("seconds per step", *made.seconds, "all", box=None)
    values = [*made.seconds.values(), sum(made.seconds.values())]
    seconds.add_row("", *(f"{value:.1f}" for value in values))
    return [memory, seconds]


def micro_batch_sentences(made: Plan) -> list[str]:
    """What a micro-batch holds, in one sentence; none if nothing fits."""
    if made.micro_batches is None or made.micro_batches.footprint is None:
        return []
    tokens, longest = made.micro_batches.micro_batch_tokens, made.longest
    recomputed, more = (made.micro_batches.recomputed(count) for count in (tokens, longest))
    return [
        f"Training takes micro-batches of {tokens} tokens; {recomputed} of {made.micro_batches.footprint.layers} "
        "layers recompute their activations"
        f"{f', {more} for a sequence of {longest} tokens' if more > recomputed else ''}."
    ]


def expert_sentences(config: RunConfig, made: Plan) -> list[str]:
    """What the experts are, and the adapter on them, in one sentence; none for a dense model."""
    sizes, decoder = made.sizes, made.sizes.decoder
    if not decoder.has_experts:
        return []
    unit, word = (1e9, "billion") if sizes.active > 5e7 else (1e6, "million")
    adapted = "which get no adapter"
    if adapts_experts(config.adapter):
        how = "with shared outer factors" if config.adapter.experts == "shared" else "each with its own"
        adapted = f"with adapters of rank {expert_rank(config.adapter)} on experts, {how}"
    return [
        f"Of {sizes.body / unit:.1f} {word} weights in the layers a token is multiplied by {sizes.active / unit:.1f}: "
        f"{decoder.chosen} of {decoder.experts} experts in {len(decoder.sparse)} layers, {adapted}."
    ]


def sentences(config: RunConfig, made: Plan) -> list[str]:
    """What fits, in words, or what to change."""
    if made.problems:
        fitting = advice(config, made.sizes, made.card)
        lines = expert_sentences(config, made) + [f"Does not fit: {problem}." for problem in made.problems]
        return lines + [f"Fits with {change}." for change in fitting]
    if not config.kind.samples:
        alone = "Nothing is sampled, so that no engine and no KV cache is beside it."
        return [*expert_sentences(config, made), *micro_batch_sentences(made), alone]
    rollout = config.rollout
    held, states = made.sizes.cached_tokens(made.context), made.sizes.state_bytes
    at_once = min(made.cache_tokens // held, rollout.prompts_per_step * rollout.group_size, MAX_SEQUENCES)
    holds = made.cache_tokens if made.sizes.window is None else made.cache_tokens * made.context // held
    lines = [
        *expert_sentences(config, made),
        f"The KV cache holds {holds} tokens: {at_once} completions of full length at once"
        f"{f', each with {states / 2**20:.0f} MiB of states' if states else ''}.",
        f"The longest completions that would fit have {largest_completion(config, made.sizes, made.card)} tokens "
        f"(rollout.max_new_tokens, here {rollout.max_new_tokens}).",
    ]
    lines += micro_batch_sentences(made)
    if (start := trainee_of(config).start_bytes(made.sizes)) and START not in made.memory["rollout"]:
        lines.append(
            f"The 16-bit weights that the adapter is added to, {start / 2**30:.1f} GiB, lie in the machine's own "
            "memory, and each sync streams them."
        )
    lines += validation_sentences(config, made)
    lines += _about_activations(config, made)
    lines.append(f"Seconds are for completions of the full {rollout.max_new_tokens} tokens, by the cost model.")
    if made.card.capability not in (None, MEASURED):
        lines.append(
            f"They are a guess on {made.card.name}, since qerl ran on Hopper alone; `qerl doctor` tries the card."
        )
    ours = rollout.kernel in ("auto", "qerl") and "qerl" in formats.get(config.model.format).kernels
    if ours and made.card.capability is not None:
        lines += _about_tilings(made.card) + _about_attention(config, made)
    return lines


def _about_name(config: RunConfig, made: Plan) -> list[str]:
    """That a name tells that a model is quantized, but not how: ModelOpt leaves some linears in 8 or 16 bits."""
    named = made.sizes.named
    if named is None or not QUANTIZED.search(named):
        return []
    return [
        f"{named} is known by its name alone: all its linears are counted as {formats.get(config.model.format).label} "
        "weights, whatever its files hold; for a plan of those, give its folder."
    ]


def _about_tilings(card: Card) -> list[str]:
    """How our kernel is set there, unless by the defaults of the card that they were measured on."""
    from qerl.formats.nvfp4.tuning import said_of, tables

    kinds = ((table, card_named(table.card, card.memory_gib)) for table in tables())
    table = next((table for table, known in kinds if known is not None and known.name == card.name), None)
    if table is None and card.capability == MEASURED:
        return []
    kernel = "Hopper" if card.capability == MEASURED else "cards from Ampere on"
    return [f"Decoding multiplies by qerl's kernel for {kernel}; its tilings are {said_of(table, card.capability)}."]


def _about_attention(config: RunConfig, made: Plan) -> list[str]:
    """That a decode step attends by our kernel on a card where it was not measured, in all layers."""
    sizes, rollout = made.sizes, config.rollout
    attends = sizes.states is None and not sizes.decoder.full and not sizes.windowed
    attends &= takes(sizes.projections["q_proj"][0] // sizes.head_dim, sizes.kv_heads, sizes.head_dim)
    attends &= rollout.kv_cache_dtype in (("auto", "fp8") if rollout.kernel == "qerl" else ("auto",))
    if not attends or made.card.capability[0] in (MEASURED[0], VLLM_ATTENDS):
        return []
    return [
        "Decode steps attend by qerl's kernel, too, which no such card has run; rollout.kernel: marlin takes vLLM's."
    ]


def _about_activations(config: RunConfig, made: Plan) -> list[str]:
    lines = []
    if calibrates(config.qat):
        length, rows = calibrated_tokens(config.qat, config.data.max_prompt_tokens)
        seconds = calibration_seconds(
            config.qat, config.data.max_prompt_tokens, made.sizes, TRAIN_RATE * made.card.tflops * 1e12
        )
        lines.append(
            f"Before the first step the 16-bit model reads {rows} rows of {length} tokens at most to find the scales "
            f"of activations: about {max(seconds, 1):.0f} s after it is loaded."
        )
    if config.distill is None and rounds_to_four_bits(config.qat, made.sizes):
        lines.append(f"Note: {GRPO_WARNING}.")
    return lines
