"""What a run of a recipe takes on a card, known before anything is loaded: memory and seconds by phase. No torch.

Memory follows the code that allocates it: the engine's budget and KV cache (qerl/plan/engine_memory.py), the
micro-batches (qerl/plan/micro_batch_plan.py), and the adapter with its optimizer state. Seconds follow the model in
`seconds.py`, for the steps and for the recipe's validations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.devices import BF16_CAPABILITY, FP8_CAPABILITY
from qerl.base.errors import ConfigError, EngineError
from qerl.checkpoint.load import check_kv_cache
from qerl.config.names import OF_EXPERTS, OF_STATES, PROJECTIONS, adapts_experts, expert_rank
from qerl.data.rows import sources_of
from qerl.model.costs import UNRECORDED
from qerl.plan.engine_memory import (
    CONTEXT,
    GRAPH_RESERVE,
    GRAPHS,
    KERNELS,
    MAX_SEQUENCES,
    Card,
    budget_bytes,
    chosen_bytes,
    kv_cache_bytes,
    least_bytes,
    outside_bytes,
    plan_memory,
    sampler_bytes,
    smaller_base,
)
from qerl.plan.micro_batch_plan import GIB, MARGIN, Footprint, MicroBatchPlan, Shapes, Wishes, plan_micro_batches
from qerl.plan.sizes import CALIBRATING, ModelSizes, calibrates, calibration_memory, teacher_bytes, teacher_work
from qerl.plan.trained import BYTES, Adapter, engine_expert_parameters, trainee
from training.preflight.seconds import TRAIN_RATE, decode_seconds, full_lengths, largest_rows, step_seconds

if TYPE_CHECKING:
    from qerl.checkpoint.experts import Decoder
    from qerl.config.schema import RunConfig
    from qerl.config.section import Conflicts


GRADIENTS, DECODED = "gradients", "decoded experts"
CHOSEN = "chosen experts"  # for each token of the KV cache, also while it is released
START = "16-bit weights"  # that the adapter is added to
SLOWER = 1.15  # times that training may be slower with masters in float32 than in bfloat16, where `auto` chooses
ENGINE_WORK = int(1.2 * GIB)  # activations of a prefill of 8192 tokens and logits of a full batch


@dataclass(frozen=True)
class Problem:
    """What does not fit, and what to change. It needs `needed` bytes of `available`; both are 0 if it is not memory."""

    text: str
    needed: float = 0
    available: float = 0

    def exceeds(self, share: float) -> bool:
        """Whether it is too large by more than `share`: the plan itself is not exact."""
        return self.needed > self.available * (1 + share)


@dataclass(frozen=True)
class Plan:
    """Memory in bytes and time in seconds; `found` is empty if everything fits."""

    card: Card
    sizes: ModelSizes
    limit: int
    memory: dict[str, dict[str, float]]  # phase -> what takes it -> bytes
    seconds: dict[str, float]  # phase -> seconds per step
    micro_batches: MicroBatchPlan | None
    cache_tokens: int
    context: int  # of an engine, which needs room for one token more than the longest row has; 0 without one
    longest: int  # tokens of a row
    found: tuple[Problem, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem.text for problem in self.found)

    def peak(self, phase: str) -> float:
        return sum(self.memory[phase].values())


def with_values(config: RunConfig, values: dict[str, object]) -> RunConfig:
    """The configuration with `section.key` values replaced, unchecked."""
    for name, value in values.items():
        section, key = name.split(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def check_ranks(config: RunConfig, size: int) -> None:
    """Raise ConfigError for a run that cannot be shared by so many processes."""
    key, count, what = "rollout.prompts_per_step", config.rollout.prompts_per_step, "group"
    if not config.kind.samples:
        key, count, what = "sft.rows_per_step", config.sft.rows_per_step, "row"
    if count < size:
        raise ConfigError(
            f"{key}: {count} gives {size} processes less than a {what} each: write {size} or more, or start fewer"
        )
    if size > 1 and config.qat is not None and config.qat.forward == "masters":
        raise ConfigError(
            "qat.forward: masters multiplies by weights of which each process has a part: write --gpus 1, or "
            "qat.forward: packed"
        )
    if config.environment is not None and size > 1:
        raise ConfigError("environments are played by one process: write --gpus 1, or leave torchrun out")


def plan(config: RunConfig, sizes: ModelSizes, card: Card) -> Plan:
    """Plan a run with the vllm engine, or one on given rows. `problems` says what does not fit; the rest is planned
    nevertheless. Raises ConfigError for keys that the model cannot have."""
    check_layers(config, sizes.decoder)
    config = settled_for(config, sizes, card)
    if not config.kind.samples:
        return _plan_of_rows(config, sizes, card)
    room = _Room(int(card.memory_gib * GIB), *_weights_and_outside(config, sizes, card.ranks), card.has_fp8)
    limit, _ = room.limit_and_budget(config)
    context = config.data.max_prompt_tokens + config.longest_completion + 1
    common = {"weights": room.weights, **_trainer(config, sizes, card.ranks)}
    common |= {"context": CONTEXT, "kernels": KERNELS, "CUDA graphs": GRAPHS}
    common["sampler"] = sampler_bytes(MAX_SEQUENCES, sizes.vocabulary)
    problems: list[Problem] = []
    if sizes.positions is not None and context - 1 > sizes.positions:
        text = (
            f"a prompt of {config.data.max_prompt_tokens} and a completion of {config.longest_completion} tokens "
            f"are more than the model's {sizes.positions} positions: lower rollout.max_new_tokens"
        )
        problems.append(Problem(text))
    cache = _cache_bytes(config, sizes, room, context, problems)
    cache_tokens = int(cache / sizes.kv_bytes(config.rollout.kv_cache_dtype))
    if chosen := cache_tokens * _chosen_bytes(config, sizes):
        common[CHOSEN] = chosen
    micro_batches, training = _trained(config, sizes, card, limit, common, problems)
    seconds = step_seconds(config, sizes, card, micro_batches, full_lengths(config))
    memory = {
        "rollout": {**common, "KV cache": cache, "engine's work": ENGINE_WORK + room.prefill(config, sizes)},
        "training": training,
    }
    if calibrates(config.qat):
        memory = {CALIBRATING: calibration_memory(config.qat, config.data.max_prompt_tokens, sizes), **memory}
        problems += _calibration_problems(memory[CALIBRATING], limit)
    found = tuple(problems)
    return Plan(card, sizes, limit, memory, seconds, micro_batches, cache_tokens, context, context - 1, found)


def _calibration_problems(memory: dict[str, float], limit: int) -> list[Problem]:
    if (needed := sum(memory.values())) <= limit:
        return []
    text = (
        f"calibrating activations takes {needed / GIB:.1f} GiB with the 16-bit model, and the limit is "
        f"{limit / GIB:.1f} GiB: take dynamic scales (qat.quant_cfg: nvfp4_w4a4)"
    )
    return [Problem(text, needed, limit)]


def _plan_of_rows(config: RunConfig, sizes: ModelSizes, card: Card) -> Plan:
    """The plan of a run that samples nothing: the base is there once, and no engine is beside it."""
    weights, problems = int(sizes.weights_bytes(config.model.format)), []
    limit, _ = budget_bytes(int(card.memory_gib * GIB), None, config.memory.cap_gib, 0)
    common = {"weights": weights, **_trainer(config, sizes, card.ranks), "context": CONTEXT, "kernels": KERNELS}
    micro_batches, training = _trained(config, sizes, card, limit, common, problems)
    seconds, longest = step_seconds(config, sizes, card, micro_batches, full_lengths(config)), config.longest_row
    return Plan(card, sizes, limit, {"training": training}, seconds, micro_batches, 0, 0, longest, tuple(problems))


def _trained(
    config: RunConfig, sizes: ModelSizes, card: Card, limit: int, common: dict[str, float], problems: list[Problem]
) -> tuple[MicroBatchPlan | None, dict[str, float]]:
    """The micro-batches beside what is always there, and what training takes then."""
    footprint = _footprint(config, sizes, card)
    made = _micro_batches(config, footprint, limit, sum(common.values()), problems)
    if config.kind.samples:
        tokens = largest_rows(config, sizes, made, full_lengths(config))[1]
    else:
        tokens = max(config.longest_row, made.micro_batch_tokens if made else 0)
    least = footprint.needed(tokens, 0 if config.run.gradient_checkpointing is False else sizes.layers)
    return made, {**common, **_training(config, sizes, card.ranks, made.needed(tokens) if made else least)}


def settled_for(config: RunConfig, sizes: ModelSizes, card: Card) -> RunConfig:
    """The same with values for the card instead of `auto` in the section qat.

    `masters` become float32 if the card holds that and training then takes at most SLOWER times as long as with
    bfloat16, since micro-batches are smaller; otherwise bfloat16. `start_in` becomes the card if it holds them,
    otherwise the host.
    """
    if not config.kind.packs:
        return config
    key, values = ("start_in", ("card", "host")) if config.kind.has_adapter else ("masters", tuple(BYTES))
    if getattr(config.qat, key) != "auto":
        return config
    first, second = (config.model_copy(update={"qat": config.qat.model_copy(update={key: value})}) for value in values)
    wide = plan(first, sizes, card)
    if any(problem.needed for problem in wide.found):
        return second
    if key != "masters" or wide.micro_batches is None:
        return first
    narrow = plan(second, sizes, card).micro_batches
    return second if narrow is not None and wide.micro_batches.cost() > SLOWER * narrow.cost() else first


def lacks(config: RunConfig, card: Card) -> str | None:
    """What of a recipe a card cannot compute, and what to write instead; None if nothing is known to be lacking."""
    if not card.has_bf16:
        return (
            f"the card {card.name} has no bfloat16, in which qerl trains and samples (compute capability "
            f"{_dotted(card.capability)}, and {_dotted(BF16_CAPABILITY)} is the least): take a card from Ampere on, "
            "such as 3060, l4, a10 or a100"
        )
    if card.has_fp8 or not (asked := _in_fp8(config)):
        return None
    wanted = " and ".join(f"{key} {value}" for key, value, _ in asked)
    instead = ", ".join(f"{key}: {value}" for key, _, value in asked)
    return (
        f"{wanted} {'needs' if len(asked) == 1 else 'need'} products in FP8 (compute capability "
        f"{_dotted(FP8_CAPABILITY)}: Ada, Hopper or newer), and the card {card.name} has {_dotted(card.capability)}: "
        f"write {instead}, or take a card that has them, such as l4, 4060 or h100"
    )


def _in_fp8(config: RunConfig) -> list[tuple[str, str, str]]:
    """(key, value, what to write instead) of what computes in FP8: gradients, and the engine's products."""
    found = []
    if config.train.fp8_recipe is not None:
        found.append(("train.fp8_recipe", config.train.fp8_recipe, "null"))
    if not config.kind.samples:
        return found
    if (kind := config.rollout.kv_cache_dtype) != "auto":
        found.append(("rollout.kv_cache_dtype", kind, "auto"))
    key, name, rounds = "model.format", config.model.format, True
    if config.qat is not None:
        quant = config.qat.quant_cfg
        key, name, rounds = "qat.quant_cfg.weights.format", quant.weights.format, quant.activations != "none"
    if rounds and formats.get(name).rounds_inputs and not formats.get(name).four_bit_inputs:
        found.append((key, name, formats.DEFAULT.name))
    return found


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def trainee_of(config: RunConfig) -> Adapter:
    return trainee(config.adapter, config.qat, config.model.format, config.optim.name)


def trainer_bytes(config: RunConfig, sizes: ModelSizes, ranks: int = 1) -> int:
    """What the trainer keeps on the card during a rollout, as one of `ranks`."""
    return sum(_trainer(config, sizes, ranks).values())


def checkpoint_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """What a checkpoint takes on the disk: the trained parameters and the optimizer's state."""
    trained = trainee_of(config).trained(sizes)
    return trained.count * (trained.kept_bytes + trained.state_bytes)


def wishes_of(config: RunConfig, sizes: ModelSizes | None = None) -> Wishes:
    """What a recipe asks of its micro-batches; `sizes` are the student's where there is a teacher."""
    longest = config.longest_row
    work = None if sizes is None else teacher_work(config.distill, sizes)
    asked = config.run.micro_batch_tokens, config.run.gradient_checkpointing
    extra = (config.train.fp8[0], config.rollout.kv_cache_dtype == "fp8", trainee_of(config).gradient_bytes)
    wishes = Wishes(*asked, longest, longest * config.rows_per_step, work, *extra)
    return wishes if config.kind.samples else replace(wishes, length_keys="sft.max_tokens")


def _trainer(config: RunConfig, sizes: ModelSizes, ranks: int) -> dict[str, int]:
    trained = trainee_of(config).trained(sizes, ranks)
    kept = {trained.name: trained.count * trained.kept_bytes, "optimizer": trained.count * trained.state_bytes}
    if taught := teacher_bytes(config.distill, sizes):
        kept["teacher"] = taught
    start = trainee_of(config).start_bytes(sizes)
    return {**kept, START: start} if start and config.qat.start_in != "host" else kept


def _training(config: RunConfig, sizes: ModelSizes, ranks: int, needed: float) -> dict[str, float]:
    """What a micro-batch needs; what does not depend on its tokens is listed apart where it is much."""
    what = trainee_of(config)
    trained, apart = what.trained(sizes, ranks), what.gradient_bytes or sizes.decoder.has_experts
    gradients = trained.count * trained.gradient_bytes if apart else 0
    parts = {GRADIENTS: gradients, DECODED: sizes.decoded if sizes.decoder.has_experts else 0}
    parts = {name: size for name, size in parts.items() if size}
    return {**parts, "micro-batch": needed - sum(parts.values())}


@dataclass(frozen=True)
class _Room:
    """Bytes of the card, of the engine's weights with its adapter buffers, and of what lies outside the budget.

    `has_fp8`: whether keys and values may be kept in FP8.
    """

    total: int
    weights: int
    outside: int
    has_fp8: bool

    def limit_and_budget(self, config: RunConfig) -> tuple[int, int]:
        return budget_bytes(self.total, config.rollout.memory, config.memory.cap_gib, self.outside)

    def prefill(self, config: RunConfig, sizes: ModelSizes) -> int:
        """Bytes that the prefill of linear attention takes beside the engine's other work."""
        return sizes.at_once(self.limit_and_budget(config)[1] - least_bytes(self.weights), MAX_SEQUENCES)[1]


def _weights_and_outside(config: RunConfig, sizes: ModelSizes, ranks: int) -> tuple[int, int]:
    what = trainee_of(config)
    adapter = sizes.engine_adapter_bytes(what.engine_rank + what.start_rank)
    adapter += 2 * engine_expert_parameters(config.adapter, sizes)
    weights = int(sizes.weights_bytes(config.model.format)) + adapter
    return weights, outside_bytes(trainer_bytes(config, sizes, ranks), MAX_SEQUENCES, sizes.vocabulary)


def _cache_bytes(config: RunConfig, sizes: ModelSizes, room: _Room, context: int, problems: list[Problem]) -> int:
    """The engine's KV cache: what MAX_SEQUENCES full contexts need, or what its budget leaves."""
    limit, budget = room.limit_and_budget(config)
    wishes = config.rollout.memory, config.memory.cap_gib
    try:
        allowed = plan_memory(room.total, room.weights, *wishes, room.outside, _quantized(config))
    except EngineError as error:
        problems.append(Problem(str(error), max(least_bytes(room.weights), budget), min(limit, budget)))
        return 0
    kind = config.rollout.kv_cache_dtype
    per_token, held = sizes.kv_bytes(kind), sizes.cached_tokens(context)
    prefill = room.prefill(config, sizes)
    wanted = kv_cache_bytes(allowed, room.weights + prefill, MAX_SEQUENCES * held, per_token)
    other = room.weights + GRAPH_RESERVE + ENGINE_WORK + prefill
    if wanted is None:
        other += chosen_bytes(allowed, room.weights, per_token, _chosen_bytes(config, sizes))
    cache = wanted if wanted is not None else budget - other
    if cache < held * per_token:
        has_smaller = kind == "auto" and room.has_fp8 and not sizes.states and not sizes.decoder.full
        smaller = "set rollout.kv_cache_dtype: fp8, " if has_smaller else ""
        text = (
            f"one sequence of {context} tokens needs {held * per_token / GIB:.1f} GiB of KV cache and "
            f"{max(cache, 0) / GIB:.1f} GiB are left: lower rollout.max_new_tokens, "
            f"{smaller}or give it more memory"
        )
        problems.append(Problem(text, other + held * per_token, budget))
    elif (peak := other + cache + room.outside) > limit:
        text = (
            f"a rollout takes {peak / GIB:.1f} GiB, its budget and {room.outside / GIB:.1f} GiB outside it, and the "
            f"limit is {limit / GIB:.1f} GiB: {_lower_budget(config, room, limit)}"
        )
        problems.append(Problem(text, peak, limit))
    return max(cache, 0)


def _chosen_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """What the engine keeps of the routers' choices for a token of its KV cache, if the trainer replays them."""
    return sizes.decoder.choice_bytes if config.rollout.router_replay else 0


def _quantized(config: RunConfig) -> bool:
    return formats.get(config.model.format).quantized


def _lower_budget(config: RunConfig, room: _Room, limit: int) -> str:
    """Advice: the largest rollout.memory that fits, in the unit that was given, or more memory for the weights."""
    fitting, memory = limit - room.outside, config.rollout.memory
    if memory is None or fitting < least_bytes(room.weights):
        return f"give it more memory (card, memory.cap_gib), or take {smaller_base(_quantized(config))}"
    unit, digits = (GIB, 10) if memory > 1 else (limit, 100)
    return f"lower rollout.memory to {math.floor(digits * fitting / unit) / digits:g}"


def _footprint(config: RunConfig, sizes: ModelSizes, card: Card) -> Footprint:
    trained, work = trainee_of(config).trained(sizes, card.ranks), teacher_work(config.distill, sizes)
    shapes = Shapes.of(sizes, trainee_of(config).acting_rank, trained.count, card)
    shapes = replace(shapes, trained_bytes=trained.gradient_bytes, **wishes_of(config).of_shapes)
    found = shapes.footprint(config.loss.entropy_coef > 0)
    return found if work is None else work.beside(found)


def _micro_batches(
    config: RunConfig, footprint: Footprint, limit: int, common: float, problems: list[Problem]
) -> MicroBatchPlan | None:
    """The plan of training beside `common` bytes, which are taken before it begins; None if nothing fits."""
    wishes = wishes_of(config)
    try:
        return plan_micro_batches(footprint, wishes, int(max(limit - common, 0)))
    except EngineError as error:
        recomputed = 0 if wishes.recompute is False else footprint.layers
        least = footprint.needed(max(wishes.tokens or 0, wishes.longest), recomputed)
        problems.append(Problem(str(error), common + least / (1 - MARGIN), limit))
        return None


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
    cached = at_once * sizes.seen_tokens(prompt + new / 2) * sizes.kv_bytes(config.rollout.kv_cache_dtype)
    step = decode_seconds(sizes, card, config.model.format, at_once, cached)
    prompts = completions if sizes.states else questions
    prefill = 2 * sizes.active * prompt * prompts / (TRAIN_RATE * card.tflops * 1e12)
    return -(-completions // MAX_SEQUENCES) * new * step + prefill


def _questions(config: RunConfig) -> int | None:
    """How many questions are asked at most; None if that depends on the number of rows."""
    limit, asked = config.validation.limit, [source for source in sources_of(config.data) if source.validates]
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


def check_layers(config: RunConfig, decoder: Decoder) -> None:
    """Raise ConfigError for keys that do not fit a model's layers: of experts or linear attention where it has none, or
    what experts cannot have."""
    if others := [name for name in config.adapter.targets if name in OF_STATES and not decoder.linear]:
        raise ConfigError(
            f"adapter.targets: {', '.join(others)} are of linear attention, which {config.model.base} has not: write "
            f"some of {', '.join(PROJECTIONS)}"
        )
    if config.kind.samples and config.rollout.engine != "transformers":
        check_kv_cache(decoder, config.model.base, config.rollout.kv_cache_dtype)
    for problem in _of_experts(config, decoder) if decoder.has_experts else _of_dense(config):
        raise ConfigError(str(problem))


def _of_dense(config: RunConfig) -> Conflicts:
    from qerl.config.section import unread  # it loads pydantic

    keys = ("adapter.experts", "adapter.expert_rank", "rollout.router_replay")
    return unread(config, {"model.base": config.model.base}, "it has no experts", *keys)


def _of_experts(config: RunConfig, decoder: Decoder) -> Conflicts:
    from qerl.config.section import Conflict, unread

    adapter, base = config.adapter, {"model.base": config.model.base}
    why = "it is a mixture of experts, which qerl trains by an adapter and by products in 16 bits"
    yield from unread(config, base, why, "qat", "train.fp8_recipe")
    if not formats.get(config.model.format).holds_experts:
        others = " or ".join(each.name for each in formats.all_formats() if each.holds_experts)
        why = "it is a mixture of experts, which qerl has in other formats"
        yield Conflict({"model.format": config.model.format, **base}, why, f"model.format: {others}")
    if config.rollout.router_replay and decoder.experts > UNRECORDED:
        why = f"it has {decoder.experts} experts in a layer, and choices are recorded of up to {UNRECORDED}"
        yield Conflict({"rollout.router_replay": True, **base}, why, "rollout.router_replay: false")
    targets = {"adapter.targets": adapter.targets, **base}
    if len(decoder.sparse) == decoder.layers and all(name in OF_EXPERTS for name in adapter.targets):
        why = "an adapter on experts needs one on attention beside it"
        yield Conflict(targets, why, "q_proj, k_proj, v_proj or o_proj beside them")
    if not adapts_experts(adapter):
        return
    if not set(OF_EXPERTS) <= set(adapter.targets):
        yield Conflict(targets, "experts are adapted as a whole", f"all of {', '.join(OF_EXPERTS)}, or none of them")
    why = "files of adapters on experts have none (PEFT's target_parameters)"
    yield from unread(config, base, why, "adapter.dropout", other="adapter.experts: none")
    most = min(decoder.width, decoder.hidden)
    if (rank := expert_rank(adapter)) > most:
        key = "adapter.rank" if adapter.expert_rank is None else "adapter.expert_rank"
        yield Conflict({key: rank, **base}, "it is more than any expert can have", f"{key}: {most} or less")
