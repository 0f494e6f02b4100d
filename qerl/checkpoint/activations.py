"""How the linears of a checkpoint round their input, from its config.json and its `input_global_scale` tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError, EngineError
from qerl.checkpoint.linears import fused
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_json, read_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qerl.formats.base import Format
    from qerl.formats.nvfp4.activations import Activations

    Serve = Callable[[torch.Tensor], torch.Tensor]

SHARE = 0.25  # of the distance between results with rounded and other inputs; rounding to bfloat16 makes a twentieth
GRPO_WARNING = (
    "activations are in 4 bits: others report that GRPO does not converge so (NeMo RL, verl), and mean it for "
    "distillation and for evaluation; watch the reward, or train with activations in 16 bits"
)
INPUT_SCALE = "input_global_scale"  # of a packed linear in a file: float32 (1,), as compressed-tensors names it


def kind_of_activations(folder: Path, format: Format) -> str:
    """none, dynamic or static."""
    return format.activations(read_json(folder / "config.json").get("quantization_config"))


def rounds_to_four_bits(folder: Path, format: Format) -> bool:
    """Whether the packed linears of a checkpoint round their input to 4 bits."""
    return format.four_bit_inputs and kind_of_activations(folder, format) != "none"


def read_activations(folder: Path, format: Format) -> dict[str, Activations]:
    """How each packed linear rounds its input, by module name; empty if inputs stay in 16 bits.

    Linears that engines fuse get the largest of their scales, as in vLLM. Raises CheckpointError for scales that are
    missing, or are no positive numbers.
    """
    from qerl.formats.nvfp4.activations import Activations

    kind, tensors = kind_of_activations(folder, format), read_tensors(folder)
    if kind == "none":
        return {}
    modules = format.quantized_linears(tensors)
    if kind == "dynamic":
        return dict.fromkeys(modules, Activations())
    if missing := [module for module in modules if f"{module}.{INPUT_SCALE}" not in tensors]:
        raise CheckpointError(
            f"{folder} has static scales for activations by its config.json, and {missing[0]} has no {INPUT_SCALE} "
            f"({len(missing)} linears lack it): copy its files again, or quantize the 16-bit model"
        )
    with TensorReader(tensors) as read:
        scales = {module: _scale(module, read(f"{module}.{INPUT_SCALE}").float()) for module in modules}
    shared = {module: max(scales[each] for each in group) for group in fused(modules) for module in group}
    return {module: Activations(shared[module]) for module in modules}


def _scale(module: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1 or not math.isfinite(value := tensor.item()) or value <= 0:
        raise CheckpointError(
            f"{module}.{INPUT_SCALE} holds {tensor.flatten()[:4].tolist()}, and must be one positive number: calibrate "
            "and quantize the 16-bit model again"
        )
    return value


def place_activations_(model: nn.Module, folder: Path, format: Format) -> None:
    """Let the packed linears of `model`, which was opened from `folder`, round their input as the folder says."""
    modules = dict(model.named_modules())
    for name, activations in read_activations(folder, format).items():
        modules[name].activations = activations


def check_placed(linears: Mapping[str, nn.Module], expected: Mapping[str, Activations]) -> str:
    """What to add to a kernel's name. Raises EngineError unless `linears` round their input as `expected`."""
    for name, activations in expected.items():
        found = getattr(linears.get(name), "activations", None)
        if found != activations:
            raise EngineError(f"{name} rounds its input as {found}, not as {activations}: please report this")
    return "".join(f", {kind} 4-bit activations" for kind in {each.kind for each in expected.values()})


def check_served(
    name: str, serve: Serve, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, activations: Activations
) -> None:
    """Raise EngineError unless `serve(x)`, an engine's product of rows x (T, in), is that of the rounded rows.

    `weight` (out, in) is the decoded one, in float32. The oracle is plain torch: it rounds by the kernel's twin and
    multiplies in float32. With inputs that are not rounded the result would be about a tenth away from it.
    """
    import torch
    from torch.nn.functional import linear

    from qerl.formats.nvfp4.activations import round_by_twin

    bias = None if bias is None else bias.float()
    with torch.no_grad():
        given, rounded = serve(x).float(), round_by_twin(x, activations.global_scale)
        right, other = (linear(each.float(), weight, bias) for each in (rounded, x))
    error, distance = (given - right).norm().item(), (other - right).norm().item()
    if not error <= SHARE * distance:
        raise EngineError(
            f"{name} does not compute with activations in 4 bits, as its config.json says: the result is {error:.3g} "
            f"from that, and with 16 bits it would be {distance:.3g} from it; please report this with the versions"
        )
