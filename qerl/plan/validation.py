"""What a recipe's validations take: how many there are, and their seconds by the cost model. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.data.rows import sources_of
from qerl.plan.engine_memory import MAX_SEQUENCES
from qerl.plan.seconds import TRAIN_RATE, decode_seconds

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.plan.plan import Plan


def validation_count(config: RunConfig) -> int:
    """Validations of a whole run: every so many steps, after the last one, and perhaps before the first."""
    every = config.validation.every
    return 0 if every is None else -(-config.run.steps // every) + config.validation.at_start


def validation_seconds(config: RunConfig, made: Plan) -> float | None:
    """Seconds of one validation whose completions have full length; None if its number of rows is not known yet."""
    this, sizes, card = config.validation, made.sizes, made.card
    questions = _questions(config)
    if questions is None:
        return None
    completions = questions * this.samples
    prompt, new = config.data.max_prompt_tokens, this.max_new_tokens or config.rollout.max_new_tokens
    at_once = min(completions, MAX_SEQUENCES)
    cached = at_once * (prompt + new / 2) * sizes.kv_bytes(config.rollout.kv_cache_dtype)
    step = decode_seconds(sizes, card, config.model.format, at_once, cached)
    prefill = 2 * sizes.active * prompt * questions / (TRAIN_RATE * card.tflops * 1e12)
    return -(-completions // MAX_SEQUENCES) * new * step + prefill


def _questions(config: RunConfig) -> int | None:
    """How many questions are asked at most; None if that depends on the number of rows."""
    limit, asked = config.validation.limit, [source for source in sources_of(config) if source.validates]
    if not asked:
        return limit
    each = [min(filter(None, (source.held_out, limit)), default=None) for source in asked]
    return None if None in each else sum(each)


def validation_sentences(config: RunConfig, made: Plan) -> list[str]:
    """One sentence about the validations of a recipe that has them."""
    count = validation_count(config)
    if not count:
        return []
    seconds = validation_seconds(config, made)
    if seconds is None:
        return [f"{count} validations; their time depends on the number of rows (validation.limit is null)."]
    this = config.validation
    new = this.max_new_tokens or config.rollout.max_new_tokens
    asked = f"{_questions(config)} questions" + (f", {this.samples} completions each," if this.samples > 1 else "")
    return [
        f"A validation ({asked} of up to {new} tokens) takes up to {seconds:.1f} s: {count} in the run, "
        f"{count * seconds / 60:.1f} minutes."
    ]
