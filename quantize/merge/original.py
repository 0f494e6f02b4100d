"""Choose what to merge onto: the quantized weights that were trained on, or the 16-bit model they were quantized from.

    trained     W_hat + s B A, the policy that was trained. It is right for a 16-bit model.
    original    W + s B A. It is the only choice that works for a quantized model. W_hat lies on the grid, so rounding
                W_hat + s B A gives W_hat back wherever s B A is under half a step. W lies anywhere between grid points,
                so s B A moves the right share of the weights over a rounding boundary, and on average nothing is lost.

An adapter that was trained with a start adds what it has learned, which is not always s B A (start.py).

Q(W + s B A) is not exactly W_hat + s B A, the policy that was trained; `effect.py` measures the difference.
"""

from __future__ import annotations

from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import REPORT, quantized_from
from qerl.checkpoint.resolve import ModelRef, resolve_model
from qerl.checkpoint.shards import read_json
from qerl.formats.base import Format
from quantize.merge.base import Base, BaseReader


def choose_base(onto: str, to: Format, exact: ModelRef) -> tuple[ModelRef, tuple[str, ...]]:
    """The weights to merge onto, and notes for the user about them. Raises ConfigError or CheckpointError."""
    if onto not in ("auto", "trained", "original"):
        raise ConfigError(f"--onto {onto!r} is not known: write auto, trained or original")
    if onto == "trained" or not formats.get(exact.format).quantized or (onto == "auto" and not to.quantized):
        if onto == "original":
            raise ConfigError(f"{exact.base} is a 16-bit model, which is the original: leave --onto out")
        return exact, ()
    try:
        original = resolve_model(original_name(exact.base), formats.BF16.name)
    except CheckpointError as error:
        if onto == "original":
            raise
        return exact, (f"merged onto the quantized weights, where rounding takes most adapters away: {error}",)
    if to.quantized:
        return original, ()
    note = (
        f"merged onto the original {original.base}, not onto the quantized weights that the adapter was trained on: "
        "the result is not the policy that was trained, and only an evaluation says whether it is better or worse"
    )
    return original, (note,)


def original_name(base: str) -> str:
    """The 16-bit model that a quantized base was made from, which need not be here.

    Raises CheckpointError if it is not known, or has other weights than were quantized.
    """
    source = quantized_from(Path(base))
    if source is None:
        raise CheckpointError(f"{base} does not say which model it was quantized from: write `--onto trained`")
    if read_json(Path(base) / REPORT).get("method") == "awq":
        raise CheckpointError(
            f"{base} was quantized by awq, which rescales {source}'s weights, so that the adapter does not fit those: "
            "write `--onto trained`"
        )
    return source


def check_original(original: Base, trained: Base) -> None:
    """Raise CheckpointError unless `trained` looks like `original` after quantization; compares one layer."""
    import torch

    from qerl.checkpoint.verify import sqnr_db

    cpu = torch.device("cpu")
    layer = next(iter(sorted(trained.packed))).rpartition(".")[0]
    with BaseReader(original, cpu) as one, BaseReader(trained, cpu) as other:
        for module in sorted(module for module in trained.packed if module.startswith(layer)):
            info = original.tensors.get(f"{module}.weight")
            decoded = other.weight(module)
            value = sqnr_db(one.weight(module), decoded) if info and info.shape == tuple(decoded.shape) else 0.0
            if value is not None and value < trained.format.min_sqnr_db:
                raise CheckpointError(
                    f"{original.name} is not the model that {trained.name} was quantized from ({module} differs): "
                    "write `--onto trained`"
                )
