"""How long a run takes, what to change so that it fits, and what one card of several takes of it. No torch.

`likely` has the lengths that completions and prompts are likely to have; `advice` tries each change by the planner.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import mul
from statistics import mean
from typing import TYPE_CHECKING, Any

from qerl import formats
from qerl.base.errors import ConfigError, QerlError
from qerl.data.rows import is_local, local_rows, sources_of
from qerl.plan.engine_memory import CARDS, Card
from qerl.plan.sizes import KNOWN, ModelSizes, sizes_of
from training.preflight.plan import Plan, check_ranks, lacks, plan, with_values
from training.preflight.seconds import Lengths, full_lengths, step_seconds

if TYPE_CHECKING:
    from qerl.config.schema import DataConfig, RunConfig
    from qerl.data.tasks import Task


MEAN_COMPLETION = 0.25  # of rollout.max_new_tokens; an assumption, which the plan states
CHARACTERS = 4  # per token of English text
TEMPLATE = 20  # tokens that a chat template adds to a prompt
PEEK = 200  # rows whose prompts are looked at


@dataclass(frozen=True)
class Likely:
    """Lengths that a run is likely to have; `prompts` says where the prompts' is from."""

    lengths: Lengths
    prompts: str


def likely(config: RunConfig, mean_completion: float = MEAN_COMPLETION, prompts: Sequence[int] | None = None) -> Likely:
    """Completions of `mean_completion` tokens, or that share of the longest if it is at most 1.

    `prompts` are the tokens of the run's prompts; without them they are estimated from the text of its first rows, or
    taken to be full if its rows are on the hub. Raises ConfigError for a mean that no run can have.
    """
    longest = config.rollout.max_new_tokens
    new = mean_completion * longest if mean_completion <= 1 else mean_completion
    if not 0 < new <= longest:
        raise ConfigError(
            f"--mean-completion {mean_completion:g} is no mean of completions of at most {longest} tokens "
            "(rollout.max_new_tokens): write tokens, such as 300, or a share of the longest, such as 0.25"
        )
    if prompts:
        return Likely(Lengths(mean(prompts), new), f"as its {len(prompts)} prompts have")
    texts = [_first_of(source.data) for source in sources_of(config.data)]
    if all(texts):
        weights = [source.weight for source in sources_of(config.data)]
        lengths = [mean(map(len, own)) for own in texts]
        characters = sum(map(mul, weights, lengths)) / sum(weights)
        tokens = characters / CHARACTERS + TEMPLATE
        where = f"estimated from the text of {sum(map(len, texts))} rows"
        return Likely(Lengths(min(tokens, config.data.max_prompt_tokens), new), where)
    return Likely(Lengths(config.data.max_prompt_tokens, new), "the most that they may have: its rows are not here")


def hours(config: RunConfig, made: Plan, expected: Likely) -> tuple[float | None, float]:
    """Seconds of a whole run with the expected lengths, None where rows are given, and with full ones."""
    steps = config.run.steps
    if not config.kind.samples:
        return None, steps * sum(made.seconds.values())
    shorter, full = (
        steps * sum(step_seconds(config, made.sizes, made.card, made.micro_batches, lengths).values())
        for lengths in (expected.lengths, full_lengths(config))
    )
    return shorter, full


def duration(config: RunConfig, made: Plan, expected: Likely) -> list[str]:
    """Steps and hours of the run in words, first with full lengths, then with the expected ones."""
    steps, expect = config.run.steps, expected.lengths
    shorter, full = hours(config, made, expected)
    if shorter is None:
        longest = in_words(full)
        return [f"All {steps} steps take {longest} if every row has sft.max_tokens tokens; shorter rows take less."]
    discarded = ", and what dynamic sampling discards comes on top" if config.rollout.dynamic_sampling.enabled else ""
    return [
        f"All {steps} steps take {in_words(full)} if completions and prompts have their full length.",
        f"They take {in_words(shorter)} if completions have {expect.new:.0f} tokens on average "
        f"(--mean-completion) and prompts {expect.prompt:.0f} ({expected.prompts}){discarded}.",
    ]


def in_words(seconds: float) -> str:
    """Minutes, hours, or hours and days, whichever reads best."""
    hours = seconds / 3600
    if hours < 1.5:
        return f"{seconds / 60:.0f} minutes" if seconds >= 120 else "less than 2 minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours:.0f} hours ({hours / 24:.1f} days)"


def _first_of(data: DataConfig) -> list[str]:
    """The text of the first prompts; none of rows that cannot be read, or not without network."""
    from qerl.data.tasks import build_messages, get_task

    task = get_task(data.task)
    try:
        questions = [text for row in _first_rows(data, task) if (text := _question(row, data, task))]
    except QerlError:
        return []
    messages = [build_messages(task, text, data.system_prompt, data.prompt_template) for text in questions]
    return ["".join(message["content"] for message in each) for each in messages]


def _first_rows(data: DataConfig, task: Task) -> list[Mapping[str, Any]]:
    """The first rows of a file, or of a task that makes its own; none of a data set on the hub."""
    if data.source is not None:
        rows = (row for _, row in local_rows(data.source, data.split)) if is_local(data.source) else iter(())
    else:
        rows = iter(task.generate(data.split) if task.generate is not None else ())
    return [row for row in islice(rows, PEEK) if row is not None]


def _question(row: Mapping[str, Any], data: DataConfig, task: Task) -> str:
    """The text of a row's question, or of its messages; empty for a column that lies deeper than that."""
    own = task.columns["question"]
    names = [(data.columns or {}).get("question"), *((own,) if isinstance(own, str) else own), "question"]
    cell = next((row[name] for name in names if name in row), "")
    if isinstance(cell, list):
        return "".join(str(each.get("content", "")) for each in cell if isinstance(each, Mapping))
    return str(cell)


TOKEN_STEP = 256  # lengths of completions are advised in multiples of this
FFN = "re:.*mlp.*"  # the feed-forward layers alone, in `qat.targets`
USEFUL = 512  # tokens; shorter completions are not advised


def largest_completion(config: RunConfig, sizes: ModelSizes, card: Card) -> int:
    """The largest length that fits, by `length_key`, in multiples of TOKEN_STEP; 0 if none does."""
    given, key = not config.kind.samples, length_key(config)
    longest = (sizes.positions or 2**17) - (0 if given else config.data.max_prompt_tokens)

    def is_too_long(steps: int) -> bool:  # a run that fits also fits with fewer tokens
        return bool(plan(with_values(config, {key: steps * TOKEN_STEP}), sizes, card).problems)

    return bisect_left(range(1, longest // TOKEN_STEP + 1), True, key=is_too_long) * TOKEN_STEP


def length_key(config: RunConfig) -> str:
    """The key that limits what a step trains on: completions, or given rows."""
    return "rollout.max_new_tokens" if config.kind.samples else "sft.max_tokens"


def advice(config: RunConfig, sizes: ModelSizes, card: Card) -> list[str]:
    """Changes that make a run fit, the cheapest first; empty if it fits as it is."""
    if not plan(config, sizes, card).problems:
        return []
    found = []
    for values in _changes(config):
        changed = with_values(config, values)
        if lacks(changed, card) is not None:
            continue
        if not plan(changed, sizes, card).problems:
            found.append(_options(values))
        elif (tokens := largest_completion(changed, sizes, card)) >= USEFUL:
            found.append(_options({**values, length_key(config): tokens}))
    found += _smaller_base(config, card)
    found += _more_memory(config, sizes, card)
    return list(dict.fromkeys(found))


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
    if config.qat is not None:  # its format is its quant_cfg's, with keys of its own
        return
    own = formats.get(config.model.format)
    if not own.writable:  # the base is such a folder, which no other format takes
        return
    for other in formats.all_formats():
        if other.scheme is not None and other.bytes_per_weight < own.bytes_per_weight:
            yield {**free, "model.format": other.name}


def _leaner_training(config: RunConfig) -> Iterator[dict[str, object]]:
    """For a run that trains whole weights: fewer bytes for each of them, then the feed-forward layers alone.

    For an adapter that is packed in, the weights that it is added to in host memory.
    """
    if config.qat is not None and config.qat.mode == "adapter" and config.qat.start_in != "host":
        yield {"qat.start_in": "host"}
    if config.kind.has_adapter:
        return
    less: dict[str, object] = {}
    if config.qat.masters != "bfloat16":
        less["qat.masters"] = "bfloat16"
    if config.optim.name == "adamw":
        less["optim.name"] = "adamw_8bit"
    if less:
        yield less
    if config.qat.targets is None and not any("_attn" in pattern for pattern in config.qat.quant_cfg.ignore):
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
    names = [known.name for known in CARDS.values() if known.memory_gib >= gib and lacks(config, known) is None]
    which = (" without memory.cap_gib" if cap else "") + (f" ({', '.join(names)})" if names else "")
    return [f"{gib} GiB of GPU memory{which}"]


def _least(fits: Callable[[float], bool], low: int, high: int) -> int | None:
    """The least number from `low` to `high` that fits; None if `high` does not."""
    return bisect_left(range(high + 1), True, low, high, key=fits) if fits(high) else None


def _options(values: dict[str, object]) -> str:
    set_to = {key: f"{key}={'null' if value is None else value}" for key, value in values.items()}
    return " ".join(f'--set "{text}"' if "[" in text else f"--set {text}" for text in set_to.values())


def share_of(config: RunConfig, gpus: int) -> RunConfig:
    """The run as the card with the most work sees it. Raises ConfigError if it cannot be shared by so many.

    Training is dealt by cost, which is nearly this share. The sum of the gradient is left out.
    """
    check_ranks(config, gpus)
    limit = config.validation.limit
    values = {"rollout.prompts_per_step": -(-config.rollout.prompts_per_step // gpus)}
    if limit is not None:
        values["validation.limit"] = -(-limit // gpus)
    return with_values(config, values) if gpus > 1 else config
