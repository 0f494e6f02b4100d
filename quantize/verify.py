"""Open the written checkpoint again and check it against its source, trusting nothing of the run that wrote it.

The checks are: names, dtypes and shapes of all tensors, and the quantization_config; that scales are finite, and global
scales shared within q/k/v and gate/up; that every other tensor is equal bit by bit; and the SQNR of each linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.kinds import kind_of
from qerl.checkpoint.load import COMPUTED
from qerl.checkpoint.shards import TensorInfo, read_json, read_tensors
from qerl.errors import CheckpointError
from qerl.nvfp4.layout import GLOBAL_SCALE, TENSORS, TensorSpec, tensor_specs
from quantize.reader import TensorReader
from quantize.source import Source

if TYPE_CHECKING:
    import torch

# Rounding to e2m1 with a scale per block of 16 leaves about 20 dB on any weights; a wrong scale leaves 0 dB or less.
MIN_SQNR_DB = 10.0

ReadTensor = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class LayerCheck:
    """One quantized linear. `sqnr_db` is None if the weight is all zeros, infinite (null in JSON) if it is exact."""

    name: str
    shape: tuple[int, int]
    global_scale: float
    sqnr_db: float | None


def verify(
    folder: Path,
    source: Source,
    dense: ReadTensor,
    device: torch.device,
    advance: Callable[[], None] = lambda: None,
) -> list[LayerCheck]:
    """Check the checkpoint in `folder`; `dense(name)` gives each tensor as it was before encoding, on the CPU.

    `advance` is called after each tensor of the source. Raises CheckpointError for the first mismatch.
    """
    tensors = read_tensors(folder)
    _check_headers(source, tensors)
    _check_config(folder, source)
    checks: dict[str, LayerCheck] = {}
    chosen = {f"{module}.weight": module for module in source.quantized}
    with TensorReader(tensors) as read:
        for names in source.groups():
            for name in names:
                if name in chosen:
                    checks[chosen[name]] = _check_linear(chosen[name], read, dense(name), device)
                else:
                    _check_same(name, read(name), dense(name))
                advance()
    _check_shared(source, checks)
    return [checks[module] for module in source.quantized]


def _check_headers(source: Source, tensors: Mapping[str, TensorInfo]) -> None:
    expected: dict[str, TensorSpec] = {}
    for name, info in source.tensors.items():
        module = name.removesuffix(".weight")
        if module in source.quantized and name != module:
            expected |= {f"{module}.{part}": spec for part, spec in tensor_specs(*info.shape).items()}
        elif not name.endswith(COMPUTED):
            expected[name] = TensorSpec(info.dtype, info.shape)
    wrong = sorted(expected.keys() ^ tensors.keys())
    if wrong:
        raise _failed(f"{wrong[0]} is {'missing' if wrong[0] in expected else 'unexpected'} ({len(wrong)} such names)")
    for name, spec in expected.items():
        found = TensorSpec(tensors[name].dtype, tensors[name].shape)
        if found != spec:
            raise _failed(f"{name} is {found.dtype} {found.shape}, not {spec.dtype} {spec.shape}")


def _check_config(folder: Path, source: Source) -> None:
    if kind_of(folder) != "nvfp4":
        raise _failed("config.json does not say that it is NVFP4")
    found = read_json(folder / "config.json")["quantization_config"].get("ignore")
    if found != ["lm_head", *source.kept]:
        raise _failed(f"config.json ignores {found}, not {['lm_head', *source.kept]}")


def _check_linear(module: str, read: TensorReader, dense: torch.Tensor, device: torch.device) -> LayerCheck:
    import torch

    from qerl.nvfp4.reference import dequantize

    packed, block_scale, global_scale = (read(f"{module}.{part}").to(device) for part in TENSORS)
    try:
        decoded = dequantize(packed, block_scale, global_scale, torch.float32)
    except CheckpointError as error:
        raise _failed(f"{module}: {error}") from error
    value = sqnr_db(dense.to(device=device, dtype=torch.float32), decoded)
    if value is not None and value < MIN_SQNR_DB:
        raise _failed(f"{module} has an SQNR of {value:.1f} dB, less than {MIN_SQNR_DB:.0f}")
    return LayerCheck(module, tuple(dense.shape), float(global_scale), value)


def sqnr_db(weight: torch.Tensor, decoded: torch.Tensor) -> float | None:
    """20 log10(|w| / |w - w_hat|) in dB for float32 tensors; None if both are zero."""
    import torch

    signal = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    noise = float(torch.linalg.vector_norm(weight - decoded, dtype=torch.float64))
    if noise == 0.0:
        return None if signal == 0.0 else math.inf
    return 20.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def _check_same(name: str, written: torch.Tensor, dense: torch.Tensor) -> None:
    import torch

    if not torch.equal(written.view(torch.uint8), dense.contiguous().view(torch.uint8)):
        raise _failed(f"{name} is not the tensor that was to be written")


def _check_shared(source: Source, checks: Mapping[str, LayerCheck]) -> None:
    for modules in source.shared_scale_sets():
        scales = {checks[module].global_scale for module in modules}
        if len(scales) != 1:
            raise _failed(f"{modules[0]}.{GLOBAL_SCALE} is not that of {', '.join(modules[1:])}: {sorted(scales)}")


def _failed(detail: str) -> CheckpointError:
    return CheckpointError(
        f"the written checkpoint does not pass its check and was removed: {detail}. If the model itself is sound, "
        "try again, and report it with this line if it stays"
    )
