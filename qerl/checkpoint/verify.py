"""Open the written checkpoint again and check it against its source, trusting nothing of the run that wrote it.

The checks are: names, dtypes and shapes of all tensors, and the quantization_config; that scales are finite, and global
scales shared within q/k/v and gate/up; that every other tensor is equal bit by bit; and the SQNR of each linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.activations import INPUT_SCALE, kind_of_activations
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.load import COMPUTED
from qerl.checkpoint.shards import TensorInfo, TensorReader, has_own_head, read_json, read_tensors
from qerl.checkpoint.source import Source, Tensors
from qerl.formats.base import Format, TensorSpec

if TYPE_CHECKING:
    import torch

ReadTensor = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class LayerCheck:
    """One quantized linear. `sqnr_db` is None if the weight is all zeros, infinite (null in JSON) if it is exact."""

    name: str
    shape: tuple[int, int]
    global_scale: float | None  # None: the format has none
    sqnr_db: float | None


class FailedCheck(CheckpointError):
    """The written checkpoint is not what it should be; `detail` says where."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"the written checkpoint does not pass its check and was removed: {detail}. If the model itself is sound, "
            "try again, and report it with this line if it stays"
        )
        self.detail = detail


def verify(
    folder: Path,
    source: Source,
    dense: ReadTensor,
    device: torch.device,
    advance: Callable[[], None] = lambda: None,
    judge_weights: bool = True,
) -> list[LayerCheck]:
    """Check the checkpoint in `folder`; `dense(name)` gives each tensor as it was before encoding, on the CPU.

    `advance` is called after each tensor of the source. Raises FailedCheck for the first mismatch and, if the weights
    are to be judged, for an SQNR below the format's least, which rounding leaves only with wrong scales.
    """
    tensors = read_tensors(folder)
    _check_headers(folder, source, tensors)
    _check_config(folder, source)
    checks: dict[str, LayerCheck] = {}
    least = source.format.min_sqnr_db
    with TensorReader(tensors) as read:
        for names in source.groups():
            for name in names:
                if name in source.chosen:
                    check = _check_linear(source.chosen[name], source.format, read, dense(name).to(device))
                    if judge_weights and check.sqnr_db is not None and check.sqnr_db < least:
                        raise FailedCheck(f"{check.name} has an SQNR of {check.sqnr_db:.1f} dB, less than {least:.0f}")
                    checks[check.name] = check
                else:
                    check_same(name, read(name), dense(name))
                advance()
    _check_shared(source, checks)
    return [checks[module] for module in source.quantized]


def check_input_scales(folder: Path, scales: Mapping[str, torch.Tensor]) -> None:
    """Raise FailedCheck unless the static scales of activations in `folder` are `scales`, float32 (1,) by module."""
    with TensorReader(read_tensors(folder)) as read:
        for module, scale in scales.items():
            check_same(f"{module}.{INPUT_SCALE}", read(f"{module}.{INPUT_SCALE}"), scale)


def _check_headers(folder: Path, source: Source, tensors: Mapping[str, TensorInfo]) -> None:
    expected: dict[str, TensorSpec] = {}
    if kind_of_activations(folder, source.format) == "static":
        expected |= {f"{module}.{INPUT_SCALE}": TensorSpec("F32", (1,)) for module in source.quantized}
    for name, info in source.tensors.items():
        if module := source.chosen.get(name):
            expected |= {f"{module}.{part}": spec for part, spec in source.format.tensor_specs(*info.shape).items()}
        elif not name.endswith(COMPUTED):
            expected[name] = TensorSpec(info.dtype, info.shape)
    wrong = sorted(expected.keys() ^ tensors.keys())
    if wrong:
        how = "missing" if wrong[0] in expected else "unexpected"
        raise FailedCheck(f"{wrong[0]} is {how} ({len(wrong)} such names)")
    for name, spec in expected.items():
        found = TensorSpec(tensors[name].dtype, tensors[name].shape)
        if found != spec:
            raise FailedCheck(f"{name} is {found.dtype} {found.shape}, not {spec.dtype} {spec.shape}")


def _check_config(folder: Path, source: Source) -> None:
    if not format_of(folder).is_kind_of(source.format):
        raise FailedCheck(f"config.json does not say that it is {source.format.label}")
    found, kept = read_json(folder / "config.json")["quantization_config"].get("ignore"), source.unquantized()
    if found != kept:
        raise FailedCheck(f"config.json ignores {found!s:.200}, not {kept!s:.200}")
    check_head(folder)


def check_head(folder: Path) -> None:
    """Raise FailedCheck if config.json has the embeddings as the head, and the file a head that differs from them."""
    if has_own_head(read_json(folder / "config.json"), read_tensors(folder)):
        raise FailedCheck("config.json ties the head to the embeddings, and the file has a head of its own")


def _check_linear(module: str, format: Format, read: TensorReader, dense: torch.Tensor) -> LayerCheck:
    import torch

    tensors = {part: read(f"{module}.{part}").to(dense.device) for part in format.tensors}
    try:
        decoded = format.dequantize(tensors, torch.float32)
    except CheckpointError as error:
        raise FailedCheck(f"{module}: {error}") from error
    value = sqnr_db(dense.to(torch.float32), decoded)
    shared = float(tensors[format.shared_tensor]) if format.shared_tensor else None
    return LayerCheck(module, tuple(dense.shape), shared, value)


def sqnr_db(weight: torch.Tensor, decoded: torch.Tensor) -> float | None:
    """20 log10(|w| / |w - w_hat|) in dB for float32 tensors; None if both are zero."""
    import torch

    signal = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    noise = float(torch.linalg.vector_norm(weight - decoded, dtype=torch.float64))
    if noise == 0.0:
        return None if signal == 0.0 else math.inf
    return 20.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def check_same(name: str, written: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise FailedCheck unless two tensors are equal to the bit."""
    import torch

    same = written.dtype == expected.dtype and written.shape == expected.shape
    if not same or not torch.equal(written.view(torch.uint8), expected.contiguous().view(torch.uint8)):
        raise FailedCheck(f"{name} is not the tensor that was to be written")


def checked(folder: Path, groups: Iterable[Tensors]) -> Iterator[Tensors]:
    """The tensors of `groups`, each after it was compared with the one in `folder`, which must hold no others.

    Raises FailedCheck for the first that is not equal to the bit.
    """
    found = read_tensors(folder)
    left = set(found)
    with TensorReader(found) as read:
        for group in groups:
            for name, tensor in group.items():
                if name not in left:
                    raise FailedCheck(f"{name} is missing")
                check_same(name, read(name), tensor)
            left -= group.keys()
            yield group
    if left:
        raise FailedCheck(f"{min(left)} is unexpected")


def _check_shared(source: Source, checks: Mapping[str, LayerCheck]) -> None:
    for modules in source.fused_sets():
        scales = {checks[module].global_scale for module in modules}
        if len(scales) != 1:
            raise FailedCheck(
                f"{modules[0]}.{source.format.shared_tensor} is not that of {', '.join(modules[1:])}: {sorted(scales)}"
            )
