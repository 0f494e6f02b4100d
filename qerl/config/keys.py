"""Every key of a recipe as a table, and the key that a mistyped one was meant to be."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from qerl.config.choice import OneOf
from qerl.config.schema import RunConfig
from qerl.config.section import Section
from qerl.config.yaml_text import Path

# What other trainers (TRL, verl, NeMo RL, open-r1, PEFT) call our keys. Their names are too different for difflib.
OTHER_NAMES = {
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "per_device_train_batch_size": "run.micro_batch_tokens",
    "micro_batch": "run.micro_batch_tokens",
    "micro_batch_size": "run.micro_batch_tokens",
    "gradient_accumulation_steps": "rollout.prompts_per_step",
    "max_steps": "run.steps",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_checkpoints",
    "output_dir": "run.out",
    "lr": "optim.learning_rate",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "warmup": "optim.warmup_ratio",
    "lr_scheduler_type": "optim.schedule",
    "lora_r": "adapter.rank",
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "beta": "loss.kl_coef",
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_model", "teacher_model_name"), "distill.teacher"),
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "loss_type": "loss.type",
    "importance_sampling_level": "loss.level",
    "scale_rewards": "loss.advantage_scale",
    "mask_truncated_completions": "loss.mask_truncated",
    "vllm_gpu_memory_utilization": "rollout.memory",
    "gpu_memory_utilization": "rollout.memory",
    **dict.fromkeys(("partial_rollout", "partial_rollouts", "over_sampling_batch_size"), "rollout.carry_over"),
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "vllm_kv_cache_dtype": "rollout.kv_cache_dtype",
    "dataset": "data.task",
    "dataset_name": "data.source",
    "reward_funcs": "rewards",
    **dict.fromkeys(("dataset_mixture", "datasets", "dataset_weights", "blend"), "data.sources"),
    **dict.fromkeys(("curriculum_learning", "sampler", "online_difficulty_filtering"), "data.curriculum"),
    "hard_threshold": "data.curriculum.low",
    "easy_threshold": "data.curriculum.high",
    "hard_fraction": "data.curriculum.hard_share",
    "easy_fraction": "data.curriculum.easy_share",
    "environment_factory": "environment.name",
    "noise_scheduler": "noise.enabled",
    **dict.fromkeys(("eval_steps", "eval_strategy", "eval_every", "test_freq", "val_period"), "validation.every"),
    **dict.fromkeys(("eval_on_start", "val_before_train", "val_at_start"), "validation.at_start"),
    **dict.fromkeys(("eval_dataset", "val_files", "val_data"), "validation.source"),
    **dict.fromkeys(("max_val_samples", "val_max_samples", "validation.rows"), "validation.limit"),
    "num_generations_eval": "validation.samples",
    "load_best_model_at_end": "validation.keep_best",
    "metric_for_best_model": "validation.metric",
    "early_stopping_patience": "validation.stop_after",
    "early_stopping_threshold": "validation.min_improvement",
    "quant_cfg": "qat.quant_cfg",
    "quant_calib_data": "qat.quant_cfg.calibration.data",
    "quant_calib_size": "qat.quant_cfg.calibration.rows",
    "quant_batch_size": "qat.quant_cfg.calibration.batch",
    "quant_sequence_length": "qat.quant_cfg.calibration.length",
    "ignore_patterns": "qat.quant_cfg.ignore",
    "activation_observer": "qat.quant_cfg.activations",
    "quantization_config_path": "qat.quant_cfg",
    "qat.enable": "qat.mode",
    "fp8_recipe": "train.fp8_recipe",
    "fp8_cfg": "train.fp8_recipe",
    "fp8_format": "train.fp8",
    "qat.group_size": "qat.quant_cfg.weights.group",
}
OTHER_VALUES = {  # (key, another trainer's value of it) -> what to write
    ("qat.mode", "w4a16"): "qat.quant_cfg: nvfp4_w4a16",
    ("qat.mode", "w4a4"): "qat.quant_cfg: nvfp4_w4a4",
}


class Key(NamedTuple):
    """A row of the table of keys; `default` is as YAML writes it, or "required"."""

    key: str
    type: str
    default: str
    description: str


def describe_config() -> list[Key]:
    """Every key in order, without the sections; the keys of a reward are listed as rewards.N.name."""
    return [Key(".".join(path), type_text(field), default_text(field), field.description) for path, field in _leaves()]


def type_text(field: FieldInfo) -> str:
    """The type as a person writes it: `number > 0 or null`, `one of nvfp4, bf16`, `list of text`."""
    if choice := next((each for each in field.metadata if isinstance(each, OneOf)), None):
        return f"one of {', '.join(choice.names())}"
    shown = [_type_name(kind) for kind in _alternatives(field.annotation)]
    bounds = " and ".join(_bounds(field))
    if bounds:
        shown[0] += f" {bounds}"
    return " or ".join(shown)


def default_text(field: FieldInfo) -> str:
    """The default as YAML writes it; "required" where there is none."""
    if field.is_required():
        return "required"
    return _yaml_word(field.get_default(call_default_factory=True))


def field_at(path: Path) -> FieldInfo | None:
    """The field at a path of section keys and list indices; None where there is none."""
    section: type[Section] | None = RunConfig
    field = None
    for part in path:
        if isinstance(part, int):
            continue  # a list item has the list's field, and its section was taken from that
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        section = section_of(field)
    return field


def section_at(path: Path) -> type[Section] | None:
    """The section at a path, that of an item for a list of sections; None where there is none."""
    if not path:
        return RunConfig
    field = field_at(path)
    return None if field is None else section_of(field)


def section_of(field: FieldInfo) -> type[Section] | None:
    """The Section that a field holds, alone, as the items of a list, or unless it is null."""
    kinds = get_args(field.annotation)[:1] if is_list(field) else _alternatives(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def is_list(field: FieldInfo) -> bool:
    """Whether the field holds a list."""
    return get_origin(field.annotation) is tuple


def is_mapping(field: FieldInfo) -> bool:
    """Whether the field holds a mapping with keys of the user's own."""
    return any(get_origin(kind) is dict for kind in _alternatives(field.annotation))


def nearest(word: str, words: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The word that looks most like this one; None where none does."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return found[0] if found else None


def nearest_key(path: Path) -> str | None:
    """The dotted key that an unknown one was probably meant to be: a sibling, another trainer's name, a namesake."""
    if (dotted := ".".join(map(str, path))) in OTHER_NAMES:
        return OTHER_NAMES[dotted]
    *parent, word = path
    word = str(word)
    section = section_at(tuple(parent))
    siblings = list(section.model_fields) if section else []
    prefix = "".join(f"{part}." for part in parent)
    leaves = {key.split(".")[-1]: key for key in reversed([row.key for row in describe_config()])}
    if (close := nearest(word, siblings, 0.8)) is not None:
        return prefix + close
    if word in OTHER_NAMES:
        return OTHER_NAMES[word]
    if word in leaves:
        return leaves[word]
    if (close := nearest(word, siblings)) is not None:
        return prefix + close
    close = nearest(word, list(leaves), 0.8)
    return leaves[close] if close else None


def foreign_key(path: Path, rest: Path = ()) -> tuple[str, str] | None:
    """(a key, ours) if an unknown path, together with the `rest` under it, ends in another trainer's key or in ours."""
    words = [str(part) for part in (*path, *rest)]
    own = {row.key for row in describe_config()}
    for start in range(len(words)):
        dotted = ".".join(words[start:])
        if (found := OTHER_NAMES.get(dotted, dotted if dotted in own else None)) is not None:
            return ".".join(words), found
    return None


def paths_below(value: object, path: Path = ()) -> Iterator[Path]:
    """The path of each leaf of nested mappings."""
    if not isinstance(value, dict):
        yield path
        return
    for key, inner in value.items():
        yield from paths_below(inner, (*path, key))


def _leaves(
    section: type[Section] = RunConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in section.model_fields.items():
        below = section_of(field)
        if below is None:
            yield (*path, name), field
        else:
            yield from _leaves(below, (*path, name, "N") if is_list(field) else (*path, name))


def _alternatives(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _type_name(kind: object) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return _type_name(get_args(kind)[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}[kind]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name)}"


def _yaml_word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml_word, value))}]"
    if isinstance(value, Section):
        changed = value.model_dump(exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {_yaml_word(each)}" for key, each in changed.items()) + "}"
    return str(value)
