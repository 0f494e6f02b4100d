"""Rules against values of a RunConfig that are fine alone and impossible together.

A rule takes the configuration and yields a Conflict for what it refuses: the keys, why they cannot stand together, and
what to write instead. Rules about one section stand beside its keys; here are those about several, and the order in
which all of them run. The first conflict is the one that is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qerl import formats
from qerl.config.data import columns_of, known_task, rewards, sources, template_of
from qerl.config.environment import environment
from qerl.config.names import OF_EXPERTS, adapts_experts
from qerl.config.noise import noise
from qerl.config.objectives import distill, sft
from qerl.config.quant import qat
from qerl.config.section import Conflict, Conflicts, unread
from qerl.config.train import train
from qerl.config.validation import validation

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def carry_over(config: RunConfig) -> Conflicts:
    """A step's groups are those that have ended, and what older policies drew is corrected for."""
    if not (steps := config.rollout.carry_over):
        return
    asked = {"rollout.carry_over": steps}
    yield from unread(
        config,
        asked,
        "a step trains on the groups that have ended, whichever rows were its turn, and leaves completions unfinished",
        *("rollout.dynamic_sampling.enabled", "data.sources", "data.curriculum", "environment"),
        other="rollout.carry_over: 0",
    )
    if config.loss.correction.mode == "off" and config.distill is None:
        yield Conflict(
            asked | {"loss.correction.mode": "off"},
            "tokens that an older policy drew would be taken for the present one's",
            "loss.correction.mode: token_truncate, or rollout.carry_over: 0",
        )


SUMMED_LOSSES = ("dapo", "bnpo", "dr_grpo", "cispo")  # sum over tokens: a sequence's ratio would count for each
TOKEN_BOUND = 0.01  # of a clipped ratio: GSPO clips a sequence's at 0.0004, and other losses a token's at 0.2
UNCLIPPED_LOSSES = ("cispo", "sapo", "vespo")  # they ignore `delta`


def batch(config: RunConfig) -> Conflicts:
    """The prompts, or the rows, of a step are different rows."""
    key, rows = "rollout.prompts_per_step", config.rollout.prompts_per_step
    if config.sft is not None:
        key, rows = "sft.rows_per_step", config.sft.rows_per_step
    if (limit := config.data.limit) is not None and limit < rows:
        why = "there are fewer rows than a step takes"
        yield Conflict({"data.limit": limit, key: rows}, why, f"data.limit: {rows} or more, or a smaller {key}")


def task(config: RunConfig) -> Conflicts:
    """The task exists, its prompt holds the question, and columns that it reads are mapped."""
    yield from known_task("data.task", config.data.task)
    yield from columns_of("data.columns", config.data.columns)
    yield from template_of("data.prompt_template", config.data.prompt_template)


def adapter_start(config: RunConfig) -> Conflicts:
    """An adapter that starts at the rounding error repairs it only as a whole."""
    own = config.adapter
    if own.start == "trained" and own.dropout:
        yield Conflict(
            {"adapter.start": own.start, "adapter.dropout": own.dropout},
            "dropout would drop a part of what repairs the base",
            "adapter.start: frozen, or adapter.dropout: 0",
        )
    if own.start == "none":
        yield from unread(config, {"adapter.start": "none"}, "there is no start", "adapter.start_rank")


def experts(config: RunConfig) -> Conflicts:
    """Keys of the adapter on experts are given only where there will be one."""
    adapter = config.adapter
    if adapts_experts(adapter):
        return
    if adapter.experts == "none":
        because, keys = {"adapter.experts": "none"}, ["adapter.expert_rank"]
    else:
        because, keys = {"adapter.targets": adapter.targets}, ["adapter.experts", "adapter.expert_rank"]
    why = f"experts, which consist of {', '.join(OF_EXPERTS)}, get no adapter"
    yield from unread(config, because, why, *keys)


def vllm_only(config: RunConfig) -> dict[str, object]:
    """The values that were set of keys that only the vllm engine reads."""
    rollout = config.rollout
    asked = {
        "rollout.kernel": rollout.kernel if rollout.kernel != "auto" else None,
        # Both engines round by calibrated scales.
        "rollout.kv_cache_dtype": None if rollout.kv_cache_dtype in ("auto", "fp8") else rollout.kv_cache_dtype,
        "rollout.memory": rollout.memory,
        "rollout.deterministic": rollout.deterministic or None,
        "memory.cap_gib": config.memory.cap_gib,
    }
    return {key: value for key, value in asked.items() if value is not None}


def engine(config: RunConfig) -> Conflicts:
    """A key that only one engine reads is not given to the other. What `auto` becomes is known, and checked, when a
    run starts (training/preflight/checks.py)."""
    rollout = config.rollout
    for key, value in vllm_only(config).items() if rollout.engine == "transformers" else ():
        yield Conflict(
            {key: value, "rollout.engine": "transformers"},
            "only the vllm engine reads it" + (" (transformers repeats itself anyway)" if value is True else ""),
            f"rollout.engine: vllm, or leave {key} out",
        )
    if rollout.memory is not None and 1 < (config.memory.cap_gib or rollout.memory) < rollout.memory:
        yield Conflict(
            {"rollout.memory": rollout.memory, "memory.cap_gib": config.memory.cap_gib},
            "the engine is given more than the whole process may take (GiB)",
            f"a rollout.memory below {config.memory.cap_gib:g}",
        )


def number_format(config: RunConfig) -> Conflicts:
    """A kernel is for weights of its format."""
    model, rollout = config.model, config.rollout
    own = formats.get(model.format)
    others = [other for other in formats.all_formats() if other.kernels]
    names = " or ".join(other.name for other in others)
    if rollout.kernel != "auto" and rollout.kernel not in own.kernels:
        yield Conflict(
            {"rollout.kernel": rollout.kernel, "model.format": model.format},
            f"that kernel multiplies {' or '.join(other.label for other in others)} weights",
            f"rollout.kernel: auto, or model.format: {names}",
        )


def loss(config: RunConfig) -> Conflicts:
    """The ratio's level and bounds fit the loss. Where TRL only warns, this refuses."""
    this = config.loss
    if this.level == "sequence" and (this.type in SUMMED_LOSSES or this.type == "vespo"):
        why = "it takes the sequence's ratio by itself" if this.type == "vespo" else "it sums over tokens"
        write = "loss.level: token" + ("" if this.type == "vespo" else ", or loss.type: grpo for GSPO")
        yield Conflict({"loss.level": "sequence", "loss.type": this.type}, why, write)
    if this.type == "luspo" and this.level == "token":
        yield Conflict(
            {"loss.type": "luspo", "loss.level": "token"}, "it is defined on sequences", "loss.level: sequence"
        )
    bounds = max(this.clip_low, this.clip_high)
    if this.level == "sequence" and this.type in ("grpo", "luspo") and this.num_iterations > 1 and bounds > TOKEN_BOUND:
        yield Conflict(
            {"loss.clip_low": this.clip_low, "loss.clip_high": this.clip_high, "loss.level": "sequence"},
            "these are a token's bounds, and a sequence's ratio is a mean over its tokens, which never gets so far",
            "loss.clip_low: 0.0003 and loss.clip_high: 0.0004, as GSPO (arXiv 2507.18071)",
        )
    if this.clip_high < this.clip_low:
        yield Conflict(
            {"loss.clip_high": this.clip_high, "loss.clip_low": this.clip_low},
            "the upper bound is the tighter one, which makes rare good tokens rarer",
            f"loss.clip_high: {this.clip_low} or more",
        )
    if this.type == "cispo" and this.clip_high < 1:
        yield Conflict(
            {"loss.clip_high": this.clip_high, "loss.type": "cispo"},
            "it is the largest ratio itself, and equal policies have a ratio of 1",
            "loss.clip_high: 5",
        )
    if this.delta is not None and this.type in UNCLIPPED_LOSSES:
        yield Conflict({"loss.delta": this.delta, "loss.type": this.type}, "it reads no delta", "loss.delta: null")
    elif this.delta is not None and this.delta <= 1 + this.clip_high:
        yield Conflict(
            {"loss.delta": this.delta, "loss.clip_high": this.clip_high},
            "it bounds the ratio beyond 1 + clip_high, and so has to be larger",
            f"loss.delta: {round(2 + this.clip_high, 6):g}, or null",
        )


def correction(config: RunConfig) -> Conflicts:
    """Sampling from another policy is corrected for, and there are ratios within the bounds."""
    this, noise = config.loss.correction, config.noise
    if this.mode == "off" and noise.enabled and noise.where == "rollout":
        yield Conflict(
            {"loss.correction.mode": "off", "noise.where": "rollout"},
            "completions of the noisy policy would be taken for the clean one's",
            "loss.correction.mode: token_truncate, or noise.where: both",
        )
    if this.floor == this.cap:
        yield Conflict(
            {"loss.correction.floor": this.floor, "loss.correction.cap": this.cap},
            "no ratio lies between them",
            "a smaller floor, or null",
        )
    if config.loss.type == "vespo" and this.mode.startswith("sequence"):
        yield Conflict(
            {"loss.correction.mode": this.mode, "loss.type": "vespo"},
            "it needs a ratio for each token",
            f"loss.correction.mode: {this.mode.replace('sequence', 'token')}",
        )


def sampling_filters(config: RunConfig) -> Conflicts:
    """Filters change the distribution that is sampled from, which the mismatch gate would take for a disagreement."""
    if (gate := config.loss.mismatch_gate) is None:
        return
    why = "the trainer's policy has no such filter, and the gate stops a run whose policies differ"
    keys = ("rollout.top_p", "rollout.top_k")
    yield from unread(config, {"loss.mismatch_gate": gate}, why, *keys, other="loss.mismatch_gate: null")


def checkpoints(config: RunConfig) -> Conflicts:
    """No checkpoint falls between two updates on one rollout: it could not be resumed to the same numbers."""
    updates = config.loss.num_iterations
    for key, every in {"run.save_every": config.run.save_every, "validation.every": config.validation.every}.items():
        if every is not None and every % updates:
            yield Conflict(
                {"loss.num_iterations": updates, key: every},
                "a checkpoint would fall between two updates on one rollout, and could not be resumed to the same "
                "numbers",
                f"{key}: {(every // updates + 1) * updates}",
            )


RULES = (
    batch, carry_over, task, sources, rewards, engine, number_format, adapter_start, qat, train, distill, sft, experts,
    loss, correction, sampling_filters, noise, checkpoints, environment, validation,
)  # fmt: skip
OF_SAMPLING = (carry_over, rewards, engine, correction, sampling_filters, noise)


def rules_of(config: RunConfig) -> list[Callable[[RunConfig], Conflicts]]:
    """The rules that a recipe is held to. Where nothing is sampled, keys about sampling are not read."""
    return [rule for rule in RULES if config.sft is None or rule not in OF_SAMPLING]
