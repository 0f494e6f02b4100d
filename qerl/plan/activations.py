"""What activations in 4 bits take of a step, and what calibrating their scales takes before a run. Pure numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl import formats
from qerl.plan.engine_memory import CONTEXT, KERNELS
from qerl.plan.teacher import forward_bytes

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.plan.cards import Card
    from qerl.plan.sizes import ModelSizes

ROUNDED = ("q_proj", "o_proj", "gate_proj", "down_proj")  # the linears whose inputs are rounded; others share theirs
LAUNCHES = 17e-6  # seconds that a decoder layer takes to round inputs of few values (benchmarks/qat)
TRAFFIC = 2.8  # times that reading and writing the values takes at the memory's speed (benchmarks/qat)
EAGER = 4e-4  # seconds of a decoder layer whose kernels are launched one by one; an estimate
CALIBRATING = "calibrating"  # the phase


def rounds_to_four_bits(config: RunConfig, sizes: ModelSizes) -> bool:
    """Whether the packed linears of a run round their input to 4 bits, by the recipe or by its base."""
    if config.qat is None:
        return sizes.four_bit_inputs
    quant = config.qat.quant_cfg
    return quant.activations != "none" and formats.get(quant.weights.format).four_bit_inputs


def rounding_seconds(sizes: ModelSizes, card: Card, tokens: float) -> float:
    """Of a forward pass over `tokens` tokens at once: 2 bytes of each input are read, and 2 written."""
    values = sum(sizes.projections[name][1] for name in ROUNDED)
    return sizes.layers * (LAUNCHES + TRAFFIC * 4 * values * tokens / (card.gb_per_s * 1e9))


def calibrates(config: RunConfig) -> bool:
    """Whether a run computes static scales before its engine opens."""
    return config.qat is not None and config.qat.quant_cfg.activations == "static"


def calibrated_tokens(config: RunConfig) -> tuple[int, int]:
    """(tokens of a row, rows) at most: of the rows that the recipe names, or of the run's own prompts."""
    asked = config.qat.quant_cfg.calibration
    own = config.data.max_prompt_tokens if asked.data is None else asked.length
    return min(asked.length, own), asked.rows


def calibration_memory(config: RunConfig, sizes: ModelSizes) -> dict[str, float]:
    """What takes the card's memory while the 16-bit model reads calibration rows, in bytes."""
    batch = min(config.qat.quant_cfg.calibration.batch, calibrated_tokens(config)[1])
    tokens = calibrated_tokens(config)[0] * batch
    weights = sizes.weights_bytes(formats.BF16.name)
    return {"16-bit model": weights, "context": CONTEXT, "kernels": KERNELS, "its work": tokens * forward_bytes(sizes)}


def calibration_seconds(config: RunConfig, sizes: ModelSizes, rate: float) -> float:
    """Of its forward passes at `rate` operations per second, each of which takes EAGER seconds per layer at least."""
    length, rows = calibrated_tokens(config)
    batch = min(config.qat.quant_cfg.calibration.batch, rows)
    return rows / batch * max(2 * sizes.body * length * batch / rate, sizes.layers * EAGER)
