"""The rules of `qerl/config/rules.py` about training through the quantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl import formats
from qerl.config.conflict import Conflict, Conflicts
from qerl.config.quant import PRESETS, WeightQuantConfig

if TYPE_CHECKING:
    from qerl.config.quant import QuantConfig
    from qerl.config.schema import RunConfig

_HEADROOM_BITS = WeightQuantConfig.model_fields["headroom_bits"].default
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
            f"model.format: {quant.weights.format}, or {_other_quant(own)}",
        )
    if quant.activations != "static":
        yield from _calibrated(quant)
    weights = quant.weights
    if formats.get(weights.format).shared_tensor is None and weights.headroom_bits != _HEADROOM_BITS:
        yield Conflict(
            {
                "qat.quant_cfg.weights.headroom_bits": weights.headroom_bits,
                "qat.quant_cfg.weights.format": weights.format,
            },
            "scales of this format follow the weights, so that none saturates",
            f"headroom_bits: {_HEADROOM_BITS}, or leave it out",
        )
    if config.rollout.kernel not in PACKING_KERNELS:
        yield Conflict(
            {"rollout.kernel": config.rollout.kernel, "qat.mode": config.qat.mode},
            "that kernel cannot take weights that change",
            f"rollout.kernel: {' or '.join(PACKING_KERNELS)}",
        )
    if config.adapter.start in ("frozen", "trained"):
        yield Conflict(
            {"adapter.start": config.adapter.start, "qat.mode": config.qat.mode},
            "qat trains 16-bit weights, from which rounding has taken nothing",
            "adapter.start: none",
        )
    yield from _packed_once(config)
    yield from _adapter(config) if config.qat.mode == "adapter" else _whole_weights(config)


def _other_quant(format: str) -> str:
    """What to write beside model.format: the first preset of that format; without one, nothing in its place."""
    usual = WeightQuantConfig.model_fields["format"].default
    presets = (n for n, keys in PRESETS.items() if keys.get("weights", {}).get("format", usual) == format)
    return f"qat.quant_cfg: {preset}" if (preset := next(presets, None)) else "leave it out"


def _calibrated(quant: QuantConfig) -> Conflicts:
    for key, value in quant.calibration:
        if value != type(quant.calibration).model_fields[key].default:
            yield Conflict(
                {f"qat.quant_cfg.calibration.{key}": value, "qat.quant_cfg.activations": quant.activations},
                "only static scales of activations are calibrated",
                "qat.quant_cfg.activations: static, or leave calibration out",
            )


def _packed_once(config: RunConfig) -> Conflicts:
    if config.loss.num_iterations > 1 and config.qat.forward == "packed":
        what = "masters are" if config.qat.mode == "weights" else "the adapter is"
        yield Conflict(
            {"loss.num_iterations": config.loss.num_iterations, "qat.mode": config.qat.mode},
            f"{what} packed when a rollout begins, and a second update on it would not see the first",
            "loss.num_iterations: 1",
        )


def _adapter(config: RunConfig) -> Conflicts:
    """There are no masters, and the adapter is in the packed weights alone."""
    if config.adapter.dropout:
        yield Conflict(
            {"adapter.dropout": config.adapter.dropout, "qat.mode": "adapter"},
            "the adapter is in the packed weights, and has no input of its own to drop out",
            "adapter.dropout: 0",
        )
    own, none = config.qat, type(config.qat).model_fields
    if own.forward == "masters":
        yield Conflict(
            {"qat.forward": own.forward, "qat.mode": "adapter"},
            "an adapter has no masters to multiply by",
            "qat.forward: packed; qat.mode: weights trains whole weights, and qat: null an adapter beside packed ones",
        )
    for key, write in (
        ("targets", "adapter.targets: [gate_proj, up_proj, down_proj], or whatever it is to change"),
        ("masters", f"adapter.dtype: {own.masters}"),
        ("train_norms", "adapter.train_norms: true"),
    ):
        if (value := getattr(own, key)) != none[key].default:
            shown = list(value) if isinstance(value, tuple) else value
            yield Conflict({f"qat.{key}": shown, "qat.mode": "adapter"}, "it is about whole weights", write)


def _whole_weights(config: RunConfig) -> Conflicts:
    """Without an adapter there is no reference, and keys of the adapter are not read."""
    if config.qat.start_in != "auto":
        yield Conflict(
            {"qat.start_in": config.qat.start_in, "qat.mode": "weights"},
            "the weights that masters start from are not kept",
            "qat.mode: adapter, or leave qat.start_in out",
        )
    if config.loss.kl_coef:
        yield Conflict(
            {"loss.kl_coef": config.loss.kl_coef, "qat.mode": "weights"},
            "a run that trains whole weights does not keep those that it started with",
            "loss.kl_coef: 0",
        )
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
    for key, write in (("train_norms", "qat.train_norms: true"), ("dropout", "adapter.dropout: 0")):
        if value := getattr(config.adapter, key):
            yield Conflict({f"adapter.{key}": value, "qat.mode": "weights"}, "there is no adapter", write)
