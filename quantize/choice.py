"""What `qerl quantize` does where it was left the choice: the method, the number of rows, the rank of the start.

On a GPU all of it takes minutes. On a CPU it is estimated from the sizes, and where it would take longer than LIMIT_S,
fewer rows are used or none, and one line says what that costs. Whoever names a method or rows gets them in any case.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from qerl.checkpoint.source import Source
from quantize.calibration import HELD_OUT
from quantize.one_pass import largest_rank, modules_of_start
from quantize.options import NO_ROWS, OWN, QuantizeOptions

if TYPE_CHECKING:
    import torch

START_RANK = 64  # of the file; runs use the first 32 components or as many as they say
LIMIT_S = 300.0  # for what is done without being asked for, by estimate
# Measured on two cores with AVX-512 (2.5 GHz, torch 2.13) on SmolLM2-135M.
FLOPS_PER_THREAD = 45e9  # of products in float32
SEARCH_S = 72e-9  # per weight and thread, by `quantize.rounding.searched_scales`
COLUMN_S = 1.2e-4  # per column and 500 rows, by `quantize.rounding.gptq`

logger = logging.getLogger(__name__)


class Amount(NamedTuple):
    """How many sequences of how many tokens, and how many more to measure on."""

    size: int
    length: int
    held_out: int


ON_CARD = Amount(128, 1024, HELD_OUT)
ON_CPU = (Amount(64, 256, HELD_OUT), Amount(16, 256, 4))  # the first that does not take too long


class Choice(NamedTuple):
    """Options without anything left to choose, and how many sequences to hold out."""

    options: QuantizeOptions
    held_out: int


def choose(source: Source, options: QuantizeOptions, device: torch.device) -> Choice:
    """What to do with a model. Raises ConfigError for what a mixture of experts cannot be."""
    options = options.settled(source.name, source.decoder.has_experts)
    if options.start_rank is None:
        options = replace(options, start_rank=START_RANK if options.has_rows else 0)
        asked = None
    else:
        asked = options.start_rank
    options = replace(options, start_rank=min(options.start_rank, largest_rank(source)))
    if not options.has_rows:
        return Choice(_by(options, "search"), 0)
    if device.type != "cpu":
        return _with(source, options, ON_CARD, "search_gptq")
    unasked = not replace(options, start_rank=asked).asks_for_rows
    if not unasked or options.format.shared_tensor is None:
        return _with(source, options, ON_CPU[0], "search_gptq")
    for amount, method in zip(ON_CPU, ("search_gptq", "search"), strict=True):
        choice = _with(source, options, amount, method)
        if estimate_s(source, choice) <= LIMIT_S:
            break
    else:
        choice = Choice(_by(replace(options, calibration=NO_ROWS, start_rank=0), "search"), 0)
    _say(source, options, choice)
    return choice


def _by(options: QuantizeOptions, method: str) -> QuantizeOptions:
    return replace(options, method=method if options.method == "auto" else options.method)


def _with(source: Source, options: QuantizeOptions, amount: Amount, method: str) -> Choice:
    """The options with numbers where none were given; sequences are at most as long as the model's positions."""
    longest = source.config.get("max_position_embeddings")
    length = min(amount.length, longest) if isinstance(longest, int) else amount.length
    chosen = replace(
        _by(options, method),
        calibration_size=options.calibration_size or amount.size,
        sequence_length=options.sequence_length or length,
    )
    return Choice(chosen, amount.held_out)


def _say(source: Source, options: QuantizeOptions, choice: Choice) -> None:
    """One line if less was chosen than on a GPU. The figures are those of SmolLM2-135M."""
    whole = _with(source, options, ON_CPU[0], "search_gptq")
    if choice == whole:
        return
    minutes = estimate_s(source, whole) / 60
    if choice.options.has_rows:
        cost = "block scales are searched under a few rows (KL 0.11 nats per token where GPTQ leaves 0.05)"
    elif choice.options.method in OWN:
        cost = "block scales are searched without rows (KL 0.18 nats per token where GPTQ leaves 0.05), without a start"
    else:
        cost = "there is no start (KL 0.21 nats per token where it leaves 0.06), and nothing is measured"
    named = "" if options.method == "auto" else f"--method {options.method} "
    better = "--method search_gptq" if options.method == "auto" else f"{named}--calibration mixed"
    logger.warning(
        "calibrating on this CPU would take about %.0f minutes: %s; `%s` does it all the same, a GPU in minutes",
        *(minutes, cost, better),
    )


def estimate_s(source: Source, choice: Choice) -> float:
    """About how many seconds a choice takes on this machine's CPU, beside reading and writing."""
    import torch

    options = choice.options
    shapes = {module: source.tensors[f"{module}.weight"].shape for module in source.quantized}
    share = {module: source.decoder.share if source.decoder.place_of(module) else 1.0 for module in shapes}
    weights = sum(rows * width for rows, width in shapes.values())
    active = sum(rows * width * share[module] for module, (rows, width) in shapes.items())
    leaders = [modules[0] for modules in source.fused_sets()]
    squares = sum(shapes[module][1] ** 2 * share[module] for module in leaders)
    products = seconds = 0.0
    if options.uses_rows or options.start_rank:
        products += 2 * options.calibration_size * options.sequence_length * (active + squares)
    if options.start_rank:
        starting = [shapes[module] for module in modules_of_start(source) if module in shapes]
        columns = 4 * 2 * (options.start_rank + 16)
        products += columns * sum(2 * rows * width + width * width for rows, width in starting)
    if options.method in OWN:
        seconds += SEARCH_S * weights / torch.get_num_threads()
    if options.method == "search_gptq":
        products += sum(shapes[module][1] ** 3 for module in leaders) + sum(r * w * w for r, w in shapes.values())
        seconds += COLUMN_S * sum(shapes[module][1] for module in leaders) + COLUMN_S / 500 * weights
    measured = choice.held_out * options.sequence_length
    vocabulary, hidden = source.tensors["model.embed_tokens.weight"].shape
    products += 2 * measured * (4 * (active + vocabulary * hidden) + 3 * active)  # four models, three errors of linears
    return products / (FLOPS_PER_THREAD * torch.get_num_threads()) + seconds
