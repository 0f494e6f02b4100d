"""The error of a quantized model's outputs on rows that it was not calibrated on, and what becomes of a bad model.

Weights are no measure of a calibrated method: GPTQ lets them be wrong wherever the inputs are small. So each linear's
outputs are compared, with the inputs that it has in the 16-bit model, and the logits of the whole model. Rounding to
nearest is measured beside it on the same rows, and so is the model with its start. Each layer's weights are read when
its turn comes (`quantize.one_pass`).

A checkpoint by llm-compressor's calibration whose outputs are bad is kept, by another name: the calibration takes
hours, and a person may judge otherwise than a limit does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import CheckpointError, first_line
from qerl.checkpoint.output import set_aside
from qerl.checkpoint.shards import TensorReader
from qerl.checkpoint.source import Source, power_of_two_scale_of, weight_for_scales
from qerl.checkpoint.verify import FailedCheck, ReadTensor
from quantize.one_pass import LayeredModel

if TYPE_CHECKING:
    from qerl.formats.nvfp4.activations import Activations
    from quantize.calibration import Calibration


LOGIT_ROWS = 256  # tokens whose logits exist at once
WRITTEN, ROUNDED, STARTED = "written", "rounded", "started"


@dataclass(frozen=True)
class ModelError:
    """How far a model is from the 16-bit one, over all positions of the rows."""

    logit_error: float  # root of the mean square, relative to the 16-bit logits', both without their mean
    kl: float  # KL(16-bit || quantized) in nats per token
    same_top_token: float  # share of positions
    accuracy: float  # share of positions whose next token is the most probable one


@dataclass(frozen=True)
class OutputErrors:
    """The errors on some rows. Those of linears are relative: |x W - x W'| / |x W|, over all tokens."""

    data: str
    sequences: int
    sequence_length: int
    held_out: bool  # false: they were also calibrated on, because there were too few
    accuracy_16bit: float
    written: ModelError
    rounded: ModelError | None  # of rounding to nearest; None if that is what was written
    linears: dict[str, float] = field(repr=False)  # by module
    rounded_linears: dict[str, float] = field(repr=False)
    started: ModelError | None = None  # of what was written with its start beside it; None if there is none

    def rows(self) -> str:
        """The rows in words."""
        kind = "held-out" if self.held_out else "calibration"
        return f"{self.sequences} x {self.sequence_length} {kind} tokens"


@dataclass(frozen=True)
class Checkpoints:
    """What to compare: functions that give a group of tensors by full name, decoded.

    `rescaled` is the source as AWQ rescales it, which computes the same and has other inputs; None for other methods.
    """

    source: ReadTensor
    rescaled: ReadTensor | None
    written: TensorReader
    global_scale: str
    rounds: bool  # whether what was written is rounding to nearest
    activations: Mapping[str, Activations]  # how quantized linears round their input, by module; empty: 16 bits
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # of the start, A and B by module; empty: there is none


def measure_outputs(
    source: Source, checkpoints: Checkpoints, rows: Calibration, device: torch.device, advance: Callable[[], None]
) -> OutputErrors:
    """The errors of what was written, and of rounding to nearest beside it. `advance` is called after each layer."""
    with torch.inference_mode():
        accuracy, models, linears = _Comparison(source, checkpoints, device).run(rows.measured, advance)
    return OutputErrors(
        data=rows.data,
        sequences=len(rows.measured),
        sequence_length=len(rows.measured[0]),
        held_out=bool(rows.held_out),
        accuracy_16bit=accuracy,
        written=models[WRITTEN],
        rounded=models.get(ROUNDED),
        linears=linears[WRITTEN],
        rounded_linears=linears.get(ROUNDED, {}),
        started=models.get(STARTED),
    )


class _Comparison:
    def __init__(self, source: Source, checkpoints: Checkpoints, device: torch.device) -> None:
        self._source, self._device, self._activations = source, device, checkpoints.activations
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._weights: dict[str, Callable[[list[str]], dict[str, torch.Tensor]]] = {
            "source": partial(_read, checkpoints.source),
            WRITTEN: partial(_decode, source, checkpoints.written, device),
        }
        self._reference = {WRITTEN: "source"}
        if checkpoints.rescaled is not None:
            self._weights["rescaled"] = partial(_read, checkpoints.rescaled)
            self._reference[WRITTEN] = "rescaled"
        if not checkpoints.rounds:
            self._weights[ROUNDED] = partial(_round, source, checkpoints, device)
            self._reference[ROUNDED] = "source"
        self._factors = checkpoints.factors
        self._measured = [*self._reference, *([STARTED] if self._factors else [])]

    def run(
        self, rows: Sequence[Sequence[int]], advance: Callable[[], None]
    ) -> tuple[float, dict[str, ModelError], dict[str, dict[str, float]]]:
        ids = [torch.tensor([row], device=self._device) for row in rows]
        before, *layers, after = self._source.groups()
        model = LayeredModel(self._source, self._dtype, self._device)
        outside = self._load("source", before + after)  # no method changes these
        first = model.embed(ids, outside)
        hidden = {name: list(first) for name in ("source", *self._weights, *self._measured)}
        linears: dict[str, dict[str, float]] = {name: {} for name in self._reference}
        for number, names in enumerate(layers):
            weights = {name: self._load(name, names) for name in self._weights}
            if self._factors:
                weights[STARTED] = self._with_start(weights[WRITTEN])
            for name in hidden:
                of = [each for each, reference in self._reference.items() if reference == name]
                sums = _OutputSums(weights[name], {each: weights[each] for each in of}, self._source.quantized)
                inputs = self._activations if name in self._measured else None
                model.step(number, weights[name], hidden[name], sums.add if of else None, inputs)
                for each, errors in sums.errors().items():
                    linears[each] |= errors
            advance()
        errors = _LogitErrors(self._measured)
        for row, tokens in enumerate(ids):
            for start in range(0, tokens.shape[1] - 1, LOGIT_ROWS):
                part = slice(start, min(start + LOGIT_ROWS, tokens.shape[1] - 1))
                logits = {name: model.logits(hidden[name][row][0, part], outside) for name in hidden}
                errors.add(logits, tokens[0, part.start + 1 : part.stop + 1])
        return errors.accuracy_16bit(), errors.result(), linears

    def _with_start(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of a layer, with B A added where the start has them."""
        found = dict(weights)
        for name, weight in weights.items():
            if (factors := self._factors.get(name.removesuffix(".weight"))) is not None:
                a, b = (factor.to(self._device, self._dtype) for factor in factors)
                found[name] = weight + b @ a
        return found

    def _load(self, checkpoint: str, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = self._weights[checkpoint](names)
        return {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}


class _OutputSums:
    """Sums of squares of one layer's outputs x W, and of x (W - W') for each other checkpoint."""

    def __init__(self, weights: dict, others: dict[str, dict], modules: Sequence[str]) -> None:
        self._weights = {f"{module}.weight" for module in modules} & weights.keys()
        self._matrices = {
            name: {"": weights[name]} | {other: weights[name] - tensors[name] for other, tensors in others.items()}
            for name in self._weights
        }
        self._others = list(others)
        self._sums: dict[tuple[str, str], float] = dict.fromkeys(
            ((name, key) for name, matrices in self._matrices.items() for key in matrices), 0.0
        )

    def add(self, module: str, inputs: torch.Tensor) -> None:
        for key, matrix in self._matrices.get(f"{module}.weight", {}).items():
            norm = torch.linalg.vector_norm(inputs @ matrix.T, dtype=torch.float64)
            self._sums[f"{module}.weight", key] += float(norm) ** 2

    def errors(self) -> dict[str, dict[str, float]]:
        """By checkpoint and module: the relative error of the outputs."""
        return {
            other: {
                name.removesuffix(".weight"): _relative(self._sums[name, other], self._sums[name, ""])
                for name in self._matrices
            }
            for other in self._others
        }


class _LogitErrors:
    def __init__(self, names: list[str]) -> None:
        self._tokens = self._right_16bit = 0
        self._power = 0.0
        self._sums = {name: [0.0, 0.0, 0, 0] for name in names}  # squares, KL, same top token, right

    def add(self, logits: dict[str, torch.Tensor], next_T: torch.Tensor) -> None:
        source = logits["source"]
        top, log_p = source.argmax(-1), source.log_softmax(-1)
        self._tokens += len(next_T)
        self._right_16bit += int((top == next_T).sum())
        self._power += float((source - source.mean(-1, keepdim=True)).double().square().sum())
        for name, sums in self._sums.items():
            other = logits[name]
            difference = other - source
            sums[0] += float((difference - difference.mean(-1, keepdim=True)).double().square().sum())
            sums[1] += float((log_p.exp() * (log_p - other.log_softmax(-1))).double().sum())
            sums[2] += int((other.argmax(-1) == top).sum())
            sums[3] += int((other.argmax(-1) == next_T).sum())

    def accuracy_16bit(self) -> float:
        return self._right_16bit / self._tokens

    def result(self) -> dict[str, ModelError]:
        return {
            name: ModelError(
                _relative(squares, self._power), max(0.0, kl / self._tokens), same / self._tokens, right / self._tokens
            )
            for name, (squares, kl, same, right) in self._sums.items()
        }


def _relative(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def _read(read: ReadTensor, names: list[str]) -> dict[str, torch.Tensor]:
    return {name: read(name) for name in names}


def _decode(source: Source, read: TensorReader, device: torch.device, names: list[str]) -> dict[str, torch.Tensor]:
    tensors = {name: read(name) for name in names if name not in source.chosen}
    for name in names:
        if name in source.chosen:
            parts = {part: read(f"{source.chosen[name]}.{part}").to(device) for part in source.format.tensors}
            tensors[name] = source.format.dequantize(parts, torch.float32)
    return tensors


def _round(source: Source, checkpoints: Checkpoints, device: torch.device, names: list[str]) -> dict[str, torch.Tensor]:
    tensors = _read(checkpoints.source, names)
    scale_of = power_of_two_scale_of() if checkpoints.global_scale == "pow2" else None
    for modules in source.fused_sets():
        own = [f"{module}.weight" for module in modules]
        if own[0] not in tensors:
            continue
        weights = [weight_for_scales(name, tensors[name]).to(device) for name in own]
        packed = source.format.quantize(weights, scale_of(modules, weights) if scale_of else None)
        for name, parts in zip(own, packed, strict=True):
            tensors[name] = source.format.dequantize(parts, torch.float32)
    return tensors


logger = logging.getLogger(__name__)


def judge(outputs: OutputErrors, min_sqnr_db: float) -> None:
    """Raise FailedCheck for a linear whose outputs are wrong: further off than `min_sqnr_db` and than by rounding.

    Where the whole model is further off than by rounding, that is a warning.
    """
    largest = 10 ** (-min_sqnr_db / 20)
    for module, error in outputs.linears.items():
        rounded = outputs.rounded_linears.get(module, 0.0)
        if not (error <= largest or error <= rounded):  # NaN is wrong too
            raise FailedCheck(
                f"the outputs of {module} on {outputs.rows()} are wrong by {error:.0%} (rounding to nearest: "
                f"{rounded:.0%})"
            )
    if outputs.rounded and outputs.written.kl > outputs.rounded.kl:
        logger.warning(
            "on %s the model is further from the 16-bit one (KL %.2g) than by rounding to nearest (KL %.2g): give more "
            "rows, such as it will see, or write --method rtn",
            *(outputs.rows(), outputs.written.kl, outputs.rounded.kl),
        )


@contextmanager
def kept_if_calibrated(method: str | None, staging: Path, out: Path) -> Iterator[None]:
    """If the block raises, move what a calibration by `method` has written beside `out` and say where it is.

    None is for a method that takes minutes at most, of which nothing is kept.
    """
    try:
        yield
    except BaseException as error:
        if method is None:
            raise
        kept = set_aside(staging, out)
        if not isinstance(error, Exception):
            logger.warning("stopped before the check ended: the weights by %s are in %s", method, kept)
            raise
        reason = error.detail if isinstance(error, FailedCheck) else first_line(error)
        raise CheckpointError(
            f"the checkpoint by {method} does not pass its check and is not at {out}: {reason}. It is kept as {kept}: "
            "use it under that name if you accept this, or give more rows, such as it will see, or write --method rtn"
        ) from error
