"""The section `qat` of a recipe: training through the quantizer, and how weights and activations are quantized.

Trainer, engine and export read the same `QuantConfig`. A recipe gives it by the name of a preset, as a YAML file, or as
keys; what a run writes down is always complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from qerl import formats
from qerl.config import yaml_text
from qerl.config.section import Conflict, Conflicts, OneOf, Section, unknown, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


Patterns = Annotated[tuple[str, ...], Field(strict=False)]

FP8 = formats.FP8_BLOCK.name
CALIBRATION = "qat.quant_cfg.calibration.data"  # the name of the key with the rows for static scales
FFN_ONLY = ["lm_head", "re:.*_attn.*"]  # attention of both kinds: self_attn and linear_attn
PRESETS: dict[str, dict[str, object]] = {
    "nvfp4_w4a16": {},
    "nvfp4_w4a16_ffn": {"ignore": FFN_ONLY},
    "nvfp4_w4a4": {"activations": "dynamic"},
    "nvfp4_w4a4_static": {"activations": "static"},
    FP8: {"weights": {"format": FP8}, "activations": "dynamic"},
    "fp8_block_w8a16": {"weights": {"format": FP8}},
}


class WeightQuantConfig(Section):
    """How quantized linears keep their weights."""

    format: Annotated[str, OneOf(lambda: [each.name for each in formats.writable() if each.quantized])] = Field(
        formats.DEFAULT.name, description="format of the packed weights; model.format is the same"
    )


class CalibrationConfig(Section):
    """Rows from which static activation scales are computed."""

    data: str | None = Field(
        None,
        min_length=1,
        description="jsonl file or hub name, of which up to 512 rows are read; null: the run's own prompts",
    )


class QuantConfig(Section):
    """How trainer, engine and export quantize."""

    weights: WeightQuantConfig = Field(
        default_factory=WeightQuantConfig, description="how quantized linears keep their weights"
    )
    activations: Literal["none", "dynamic", "static"] = Field(
        "none",
        description="none: 16 bits; else as few as the weights, by scales computed on the fly or from calibration",
    )
    ignore: Patterns = Field(
        ("lm_head",), description="linears that stay in 16 bits, as for `qerl quantize --ignore`; embeddings always do"
    )
    calibration: CalibrationConfig = Field(
        default_factory=CalibrationConfig, description="rows for static activation scales"
    )


def expanded(given: object) -> object:
    """The keys that a preset's name or the path of a YAML file stands for; anything else as it is. Raises Conflict."""
    if not isinstance(given, str):
        return given
    if given in PRESETS:
        return {**PRESETS[given]}
    if Path(given).suffix in (".yaml", ".yml"):
        return _read(given)
    raise unknown("qat.quant_cfg", "preset", given, PRESETS, "a YAML file, or keys under it")


def with_its_format(given: object) -> object:
    """The keys of a whole recipe; if they leave out model.format, it is the format that qat.quant_cfg packs."""
    if not isinstance(given, Mapping) or not isinstance(qat := given.get("qat"), Mapping):
        return given
    model = given.get("model")
    try:
        weights = expanded(qat.get("quant_cfg"))["weights"]["format"]
    except (Conflict, KeyError, TypeError):  # which is refused where it belongs
        return given
    known = weights in [each.name for each in formats.all_formats()]  # another one is refused there, too
    if not known or not isinstance(model, Mapping) or "format" in model:
        return given
    return {**given, "model": {**model, "format": weights}}


def _read(path: str) -> dict:
    try:
        data = yaml_text.parse(Path(path).read_bytes().decode("utf-8-sig")).data
    except (OSError, UnicodeDecodeError, yaml_text.YamlError) as error:
        why = f"that file cannot be read ({error})"
        raise Conflict({"qat.quant_cfg": path}, why, "another file, or the name of a preset") from None
    if not isinstance(data, dict):
        keys = ", ".join(QuantConfig.model_fields)
        raise Conflict({"qat.quant_cfg": path}, "that file holds no keys", f"keys in it, such as {keys}")
    return data


class QatConfig(Section):
    """Training through the quantizer: what is trained is what is served in 4 bits."""

    mode: Literal["weights", "adapter"] = Field(
        "weights",
        description="weights: whole weights, by masters in 16 or 32 bits; adapter: a LoRA, which each sync packs into "
        "the 16-bit weights",
    )
    quant_cfg: Annotated[QuantConfig, BeforeValidator(expanded)] = Field(
        default_factory=QuantConfig, description="a preset's name, a YAML file, or keys"
    )
    forward: Literal["packed", "masters"] = Field(
        "packed",
        description="mode weights: what the trainer multiplies by; masters: 16-bit training, as in NeMo RL and verl, "
        "with a mismatch to the engine, which samples from packed weights",
    )
    targets: Patterns | None = Field(
        None,
        description="mode weights: linears that are trained, with the syntax of `ignore`; null: all that are quantized",
    )
    masters: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="mode weights: dtype of the trained weights; bfloat16 rounds at random; auto: float32 where the "
        "card holds it with room for micro-batches that are not slow",
    )
    train_norms: bool = Field(False, description="mode weights: train the decoder layers' norms too, in float32")
    start_in: Literal["auto", "card", "host"] = Field(
        "auto",
        description="mode adapter: where the 16-bit weights lie that the adapter is added to; host: in the machine's "
        "memory, from where each sync streams them; auto: card where it holds them",
    )


PACKING_KERNELS = ("auto", "qerl")  # the others take factors from the weights when these are loaded


def qat(config: RunConfig) -> Conflicts:
    """What is trained is what is served, and what is asked for exists."""
    if config.qat is None:
        return
    quant, own = config.qat.quant_cfg, config.model.format
    packed = formats.get(quant.weights.format)
    if quant.activations != "none" and not packed.rounds_inputs:
        yield Conflict(
            {"qat.quant_cfg.activations": quant.activations, "qat.quant_cfg.weights.format": quant.weights.format},
            f"activations are not rounded before {packed.label} weights",
            "qat.quant_cfg.activations: none",
        )
    if quant.activations == "static" and packed.rounds_inputs and not packed.four_bit_inputs:
        yield Conflict(
            {"qat.quant_cfg.activations": quant.activations, "qat.quant_cfg.weights.format": quant.weights.format},
            f"activations before {packed.label} weights have dynamic scales only",
            "qat.quant_cfg.activations: dynamic, or none",
        )
    if own != quant.weights.format:
        yield Conflict(
            {"model.format": own, "qat.quant_cfg.weights.format": quant.weights.format},
            "the engine would sample from other weights than those that are trained",
            f"model.format: {quant.weights.format}, or another qat.quant_cfg",
        )
    if quant.activations != "static":
        given, why = {"qat.quant_cfg.activations": quant.activations}, "only static scales are calibrated"
        yield from unread(config, given, why, "qat.quant_cfg.calibration.data")
    if config.rollout.kernel not in PACKING_KERNELS:
        yield Conflict(
            {"rollout.kernel": config.rollout.kernel, "qat.mode": config.qat.mode},
            "that kernel cannot take weights that change",
            f"rollout.kernel: {' or '.join(PACKING_KERNELS)}",
        )
    if config.adapter.start != "none":
        why = "qat trains 16-bit weights, from which rounding has taken nothing"
        yield from unread(config, {"qat.mode": config.qat.mode}, why, "adapter.start")
    if config.qat.forward == "packed":
        why = "what is trained is packed when a rollout begins, and a second update on it would not see the first"
        yield from unread(config, {"qat.mode": config.qat.mode}, why, "loss.num_iterations")
    yield from _adapter(config) if config.qat.mode == "adapter" else _whole_weights(config)


def _adapter(config: RunConfig) -> Conflicts:
    """There are no masters, and the adapter is in the packed weights alone."""
    why = "it is trained in the packed weights, and the section adapter says what of them"
    keys = ("adapter.dropout", "qat.forward", "qat.targets", "qat.masters", "qat.train_norms")
    yield from unread(config, {"qat.mode": "adapter"}, why, *keys, other="qat.mode: weights")


def _whole_weights(config: RunConfig) -> Conflicts:
    """Without an adapter there is no reference, and keys of the adapter are not read."""
    why = "whole weights are trained, without an adapter, and those that they start from are not kept"
    keys = ("qat.start_in", "loss.kl_coef", "adapter.train_norms", "adapter.dropout")
    yield from unread(config, {"qat.mode": "weights"}, why, *keys, other="qat.mode: adapter")
    if config.qat.forward == "masters" and config.loss.correction.mode == "off":
        yield Conflict(
            {"qat.forward": "masters", "loss.correction.mode": "off"},
            "completions of the packed weights would be taken for those of the masters",
            "loss.correction.mode: token_truncate, or qat.forward: packed",
        )
    if config.qat.targets == ():
        yield Conflict(
            {"qat.targets": "[]", "qat.mode": "weights"},
            "no linear would be trained",
            "qat.targets: null, for all that are packed, or patterns such as ['re:.*mlp.*']",
        )
