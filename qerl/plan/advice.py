"""What to change so that a run fits, and how much longer completions may be. The planner tries every change itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from qerl import formats
from qerl.plan.cards import CARDS, Card
from qerl.plan.plan import plan
from qerl.plan.sizes import KNOWN, ModelSizes, sizes_of
from qerl.plan.trained import trains_masters

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig

TOKEN_STEP = 256  # lengths of completions are advised in multiples of this
FFN = "re:.*mlp.*"  # the feed-forward layers alone, in `qat.targets`
USEFUL = 512  # tokens; shorter completions are not advised


def largest_completion(config: RunConfig, sizes: ModelSizes, card: Card) -> int:
    """The largest length that fits, by `length_key`, in multiples of TOKEN_STEP; 0 if none does."""
    given, key = config.sft is not None, length_key(config)
    longest = (sizes.positions or 2**17) - (0 if given else config.data.max_prompt_tokens)

    def fits(steps: int) -> bool:
        changed = with_values(config, {key: steps * TOKEN_STEP})
        return not plan(changed, sizes, card).problems

    low, high = 0, longest // TOKEN_STEP
    while low < high:  # a run that fits also fits with fewer tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * TOKEN_STEP


def length_key(config: RunConfig) -> str:
    """The key that limits what a step trains on: completions, or given rows."""
    return "rollout.max_new_tokens" if config.sft is None else "sft.max_tokens"


def advice(config: RunConfig, sizes: ModelSizes, card: Card) -> list[str]:
    """Changes that make a run fit, the cheapest first; empty if it fits as it is."""
    if not plan(config, sizes, card).problems:
        return []
    found = []
    for values in _changes(config):
        changed = with_values(config, values)
        if not plan(changed, sizes, card).problems:
            found.append(_options(values))
        elif (tokens := largest_completion(changed, sizes, card)) >= USEFUL:
            found.append(_options({**values, length_key(config): tokens}))
    found += _smaller_base(config, card)
    found += _more_memory(config, sizes, card)
    return list(dict.fromkeys(found))


def with_values(config: RunConfig, values: dict[str, object]) -> RunConfig:
    """The configuration with `section.key` values replaced, unchecked."""
    for name, value in values.items():
        section, key = name.split(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def _changes(config: RunConfig) -> Iterator[dict[str, object]]:
    """Settings that can be changed without another model or card, the cheapest first."""
    yield {}
    free: dict[str, object] = {}
    if config.run.gradient_checkpointing is False:
        free["run.gradient_checkpointing"] = "auto"
    if config.run.micro_batch_tokens is not None:
        free["run.micro_batch_tokens"] = None
    if config.rollout.memory is not None:
        free["rollout.memory"] = None
    if free:
        yield free
    if config.memory.cap_gib is not None:
        yield {**free, "memory.cap_gib": None}
    yield from ({**free, **less} for less in _leaner_training(config))
    if config.qat is not None:  # its format is that of its quant_cfg, with keys of its own
        return
    own = formats.get(config.model.format)
    for other in formats.all_formats():
        if other.scheme is not None and other.bytes_per_weight < own.bytes_per_weight:
            yield {**free, "model.format": other.name}


def _leaner_training(config: RunConfig) -> Iterator[dict[str, object]]:
    """For a run that trains whole weights: fewer bytes for each of them, then the feed-forward layers alone.

    For an adapter that is packed in, the weights that it is added to in host memory.
    """
    if config.qat is not None and config.qat.mode == "adapter" and config.qat.start_in != "host":
        yield {"qat.start_in": "host"}
    if not trains_masters(config):
        return
    less: dict[str, object] = {}
    if config.qat.masters != "bfloat16":
        less["qat.masters"] = "bfloat16"
    if config.optim.name == "adamw":
        less["optim.name"] = "adamw_8bit"
    if less:
        yield less
    if config.qat.targets is None and not any("self_attn" in pattern for pattern in config.qat.quant_cfg.ignore):
        yield {**less, "qat.targets": [FFN]}


def _smaller_base(config: RunConfig, card: Card) -> list[str]:
    """The largest smaller model of the same family that fits with the recipe as it is."""
    organisation, _, name = config.model.base.rpartition("/")
    found = re.match(r"(.*?-)(\d+(?:\.\d+)?)b(.*)", name, re.IGNORECASE)
    if found is None:
        return []
    family, size, rest = found[1].lower(), float(found[2]), re.sub(r"(?i)^b-a\d+b", "B", name[found.end(2) :])
    dense = (re.fullmatch(re.escape(family) + r"([\d.]+)b", each) for each in KNOWN)  # others have experts
    others = sorted((float(each[1]), each[0]) for each in dense if each)
    for smaller, key in reversed(others):
        if smaller < size and not plan(config, sizes_of(KNOWN[key], key), card).problems:
            base = f"{organisation}/{found[1]}{smaller:g}{rest}"
            return [f"--model {base}"]
    return []


def _more_memory(config: RunConfig, sizes: ModelSizes, card: Card) -> list[str]:
    """The least memory.cap_gib that is enough, or the least card and the known ones of that size."""
    cap, config = config.memory.cap_gib, with_values(config, {"memory.cap_gib": None})
    if cap is not None and not plan(config, sizes, card).problems:

        def fits_under(gib: float) -> bool:
            return not plan(with_values(config, {"memory.cap_gib": float(gib)}), sizes, card).problems

        least = _least(fits_under, int(cap), int(card.memory_gib))
        return [] if least is None else [f"--set memory.cap_gib={least}"]

    def fits(gib: float) -> bool:
        return not plan(config, sizes, replace(card, memory_gib=gib)).problems

    gib = _least(fits, int(card.memory_gib), 1024)
    if gib is None:
        return []
    names = [known.name for known in CARDS.values() if known.memory_gib >= gib]
    which = (" without memory.cap_gib" if cap else "") + (f" ({', '.join(names)})" if names else "")
    return [f"{gib} GiB of GPU memory{which}"]


def _least(fits: Callable[[float], bool], low: int, high: int) -> int | None:
    """The least number from `low` to `high` that fits; None if `high` does not."""
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _options(values: dict[str, object]) -> str:
    return " ".join(f"--set {_shown(key, value)}" for key, value in values.items())


def _shown(key: str, value: object) -> str:
    return f'"{key}={value}"' if isinstance(value, list) else f"{key}={'null' if value is None else value}"
