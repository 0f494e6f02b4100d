"""Calibrate a run with static scales of activations: on rows that the recipe names, or on the run's own prompts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import DataError
from qerl.checkpoint.activations import input_scales
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.data.sequences import fields_of, shuffled_rows, tokens_of
from qerl.formats import BF16
from training.preflight.checks import CALIBRATION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.checkpoint.source import Source
    from qerl.config.quant import CalibrationConfig, QuantConfig
    from training.rollout.groups import Prompt

logger = logging.getLogger(__name__)


def calibrated_scales(
    source: Source, quant: QuantConfig, prompts: Sequence[Prompt], dtype: str
) -> dict[str, torch.Tensor]:
    """The `input_global_scale` of each linear that is packed, by module name, from a forward pass of the 16-bit model.

    Raises DataError if the rows cannot be read or used.
    """
    rows = calibration_rows(quant.calibration, load_tokenizer(source.folder, source.trust_remote_code), prompts)
    logger.info("calibrating activations on %d rows, %d tokens", len(rows), sum(map(len, rows)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(source.folder, BF16.name, dtype, device, source.trust_remote_code)
    bits = quant.weights.headroom_bits
    scales = input_scales(model, source.quantized, rows, quant.calibration.batch, bits)
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return scales


def calibration_rows(
    calibration: CalibrationConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Token ids of up to `rows` rows, of `length` tokens at most each. Raises DataError if none can be used."""
    if calibration.data is None:
        return [list(prompt.ids[: calibration.length]) for prompt in prompts[: calibration.rows]]
    given = shuffled_rows(calibration.data, CALIBRATION)
    usable = [ids[: calibration.length] for row in given if (ids := tokens_of(row, tokenizer))]
    if not usable:
        raise DataError(
            f"{CALIBRATION}: {calibration.data}: none of {len(given)} rows can be used (fields of one: "
            f"{fields_of(given[0])}): a row needs `messages`, `text`, or a question with an answer"
        )
    if len(usable) < calibration.rows:
        logger.info("%s has %d usable rows, fewer than %d", calibration.data, len(usable), calibration.rows)
    return usable[: calibration.rows]
