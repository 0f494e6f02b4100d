"""The packed base that the engine opens in a run that trains whole weights: RUN/base, made of the 16-bit model.

It is rounded to nearest by the format's own arithmetic, from weights in the masters' dtype, so that its bytes are those
that a sync writes of masters which have not changed. Its global scales are powers of two with head room, and stay for
the whole run. Static scales of activations are calibrated on rows that the recipe names, or on the run's own prompts.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.base.files import in_one_step
from qerl.checkpoint import folder as sealed
from qerl.checkpoint.activations import input_scales, with_input_scales
from qerl.checkpoint.folder import BASE, REPORT
from qerl.checkpoint.load import check_config_fits, load_model, load_tokenizer, local_folder
from qerl.checkpoint.output import check_space, copy_small_files, write_json, write_weights
from qerl.checkpoint.resolve import ModelRef, resolve_model
from qerl.checkpoint.shards import TensorReader, read_json
from qerl.checkpoint.source import HEADROOM_BITS, Source, packed_groups, power_of_two_scale_of, read_source
from qerl.config.keys import drop_removed_
from qerl.config.quant import CALIBRATION, CalibrationConfig, QatConfig, QuantConfig
from qerl.data.sequences import fields_of, shuffled_rows, tokens_of
from qerl.formats import BF16
from qerl.plan.sizes import CALIBRATED, CALIBRATION_ROWS
from qerl.plan.trained import masters_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from training.loss.groups import Prompt


logger = logging.getLogger(__name__)


def calibrated_scales(source: Source, quant: QuantConfig, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """The `input_global_scale` of each linear that is packed, by module name, from a forward pass of the 16-bit model.

    Raises DataError if the rows cannot be read or used.
    """
    rows = calibration_rows(quant.calibration, load_tokenizer(source.folder, source.trust_remote_code), prompts)
    logger.info("calibrating activations on %d rows, %d tokens", len(rows), sum(map(len, rows)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(source.folder, BF16.name, "auto", device, source.trust_remote_code)
    scales = input_scales(model, source.quantized, rows, HEADROOM_BITS)
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return scales


def calibration_rows(
    calibration: CalibrationConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Token ids of up to CALIBRATION_ROWS rows, CALIBRATED tokens each at most. Raises DataError if none is usable."""
    if calibration.data is None:
        return [list(prompt.ids[:CALIBRATED]) for prompt in prompts[:CALIBRATION_ROWS]]
    given = shuffled_rows(calibration.data, CALIBRATION)
    usable = [ids[:CALIBRATED] for row in given if (ids := tokens_of(row, tokenizer))]
    if not usable:
        raise DataError(
            f"{CALIBRATION}: {calibration.data}: none of {len(given)} rows can be used (fields of one: "
            f"{fields_of(given[0])}): a row needs `messages`, `text`, or a question with an answer"
        )
    if len(usable) < CALIBRATION_ROWS:
        logger.info("%s has %d usable rows, fewer than %d", calibration.data, len(usable), CALIBRATION_ROWS)
    return usable[:CALIBRATION_ROWS]


def start_base(config: RunConfig, start: ModelRef, run_dir: Path, prompts: Sequence[Prompt] = ()) -> ModelRef:
    """The packed base of a run whose lock is held, which is made if it is not there. `start` is its 16-bit model.

    `prompts` are what static scales of activations are calibrated on, unless the recipe names rows.

    Raises ConfigError if it was made by another quant_cfg, and CheckpointError if it cannot be made, or was made of
    another model in a run that has begun. What a start that died has left of another model is made again.
    """
    folder, begun = run_dir / BASE, (run_dir / "config.yaml").exists()
    damage = sealed.damage_of(folder, {"config.json"})
    if damage is None and (origin := _other_origin(folder, start)):
        if begun:
            raise CheckpointError(
                f"{folder} was made of other weights than {start.base} has (then {origin}): give those as --model, or "
                "start a new run"
            )
        damage = f"made of the weights that {origin} had"
    if damage is None:
        _check_same(folder, config.qat, run_dir)
        return resolve_model(str(folder))
    if folder.exists():
        logger.warning("%s is no base of this run (%s) and is made again", folder, damage)
    _make(folder, config, start, prompts)
    return resolve_model(str(folder))


def _other_origin(folder: Path, start: ModelRef) -> str | None:
    """What the base was made of, if that had other weights than `start` has. Older bases do not say."""
    made = read_json(folder / REPORT)
    return made["source"] if made.get("source_digest") not in (None, _digest_of(start)) else None


def _digest_of(start: ModelRef) -> str:
    return sealed.weights_digest(local_folder(start.base), ("config.json",))


def _check_same(folder: Path, qat: QatConfig, run_dir: Path) -> None:
    made_by, own = read_json(folder / REPORT), qat.quant_cfg.model_dump(mode="json")
    drop_removed_({"qat": {"quant_cfg": made_by}})
    if differing := [key for key in QuantConfig.model_fields if made_by.get(key) != own[key]]:
        raise ConfigError(
            f"{folder}, from which the engine samples, was made by another qat.quant_cfg than the one in "
            f"{run_dir / 'config.yaml'} ({', '.join(differing)} differ), and both have to be the same: put that one "
            "back, or start a new run"
        )


def _make(folder: Path, config: RunConfig, start: ModelRef, prompts: Sequence[Prompt]) -> None:
    quant = config.qat.quant_cfg
    trust, packed = config.model.trust_remote_code, formats.get(quant.weights.format)
    source = read_source(start.base, quant.ignore, trust, "qat.quant_cfg.ignore", packed)
    check_config_fits(source.folder, source.tensors, trust)
    check_space(folder, source.output_bytes())
    logger.info("quantizing %s to %s", source.name, folder)
    static = quant.activations == "static"
    inputs = calibrated_scales(source, quant, prompts) if static else {}
    with in_one_step(folder) as partial:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with TensorReader(source.tensors) as read:
            shares = source.format.shared_tensor is not None
            scale_of = power_of_two_scale_of(headroom_bits=HEADROOM_BITS) if shares else None
            dtype = getattr(torch, masters_dtype(config.qat))

            def wide(name: str) -> torch.Tensor:
                return read(name).to(dtype) if name in source.chosen else read(name)

            write_weights(partial, with_input_scales(packed_groups(source, wide, device, scale_of), inputs))
        copy_small_files(source.folder, partial, code="auto_map" in source.config)
        entry = source.format.quantization_config(source.unquantized(), quant.activations)
        write_json(partial / "config.json", {**source.config, "quantization_config": entry})
        origin = {"source": start.base, "source_digest": _digest_of(start)}
        made = {**origin, "method": "rtn", **quant.model_dump(mode="json")}
        write_json(partial / REPORT, made)
        sealed.seal(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
