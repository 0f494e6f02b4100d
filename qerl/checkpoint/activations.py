"""How the linears of a checkpoint round their input, and the scales that they share.

It is read from config.json and the `input_global_scale` tensors. Static scales come from the largest input of each
linear over some rows. Like the weights' global scales they are powers of two with head room, so that rounded
activations are exact in bfloat16, and activations may grow in training before blocks saturate. Linears that engines
fuse read the same input, so they share their scale.

vLLM takes the global scale of an expert's gate for its up as well, and says so in a warning at most: a folder that
gives them different ones would be another model there, and is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError, EngineError
from qerl.checkpoint.experts import decoder_of, fused
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.shards import (
    WEIGHT_DTYPES,
    TensorInfo,
    TensorReader,
    read_config,
    read_tensors,
    weight_files,
)
from qerl.formats.base import BF16, Format
from qerl.formats.nvfp4.layout import INPUT_SCALE, PACKED

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qerl.checkpoint.source import Tensors
    from qerl.formats.nvfp4.activations import Activations

    Serve = Callable[[torch.Tensor], torch.Tensor]

logger = logging.getLogger(__name__)


def check_packed(folder: Path) -> None:
    """Raise CheckpointError if the experts in a packed folder do not share what they have to, or are in a format that
    they cannot be in, or if linears that engines fuse are in different ones. Warn once of inputs that stay in 16 bits.
    """
    config, format = read_config(folder), format_of(folder)
    if not format.quantized:
        return
    if drops_inputs(folder):
        _warn_of_inputs(folder.resolve())
    _check_kinds(folder, config, format)
    if not decoder_of(config, str(folder)).has_experts:
        return
    rounds = format.activations(config.get("quantization_config")) != "none"
    if rounds or not format.holds_experts:
        raise CheckpointError(
            f"{folder} is a mixture of experts in {format.label}{', with rounded activations' if rounds else ''}, and "
            "qerl has experts in NVFP4 with 16-bit activations, or in 16 bits: quantize the 16-bit model with `qerl "
            "quantize`"
        )
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in weight_files(folder))
    if found := _unequal_experts(folder, stamps):
        raise CheckpointError(found)


def drops_inputs(folder: Path) -> bool:
    """Whether a base has scales for rounded inputs that qerl leaves out. What is not a folder here counts as 16-bit."""
    if not (folder / "config.json").is_file():
        return False
    return format_of(folder).drops_inputs(read_config(folder).get("quantization_config"))


@cache
def _warn_of_inputs(folder: Path) -> None:
    logger.warning("%s has scales for rounded activations, which qerl leaves out: inputs stay in 16 bits", folder)


def _check_kinds(folder: Path, config: Mapping[str, Any], format: Format) -> None:
    tensors = read_tensors(folder)
    packed = {module: format.of(module, tensors) for module in format.quantized_linears(tensors)}
    linears = list(decoder_of(config, str(folder)).linears())
    if cut := [
        module for module in packed if f"{module}.weight" in tensors and tensors[f"{module}.weight"].dtype == "U8"
    ]:
        raise CheckpointError(
            f"{folder} has no {cut[0]}.weight_scale_2 ({len(cut)} linears lack it): download it again"
        )
    plain = {module for module in linears if (info := tensors.get(f"{module}.weight")) and info.dtype in WEIGHT_DTYPES}
    for modules in fused(linears):  # codes without scales, and what is missing, are refused where tensors are read
        labels = {each: packed.get(each, BF16).label for each in modules if each in packed or each in plain}
        if len(set(labels.values())) > 1:
            raise CheckpointError(
                f"{folder} has {', '.join(map(' in '.join, labels.items()))}, and engines multiply by them at once: "
                "give the model that it was made from"
            )


@lru_cache(maxsize=8)
def _unequal_experts(folder: Path, stamps: tuple) -> str | None:
    """What is wrong, in words. It takes seconds with thousands of experts, and a command asks several times."""
    tensors, own = read_tensors(folder), format_of(folder)
    groups = [group for group in fused(own.quantized_linears(tensors)) if ".experts." in group[0]]
    try:
        check_shared(groups, tensors, own.shared_tensor, str(folder))
    except CheckpointError as error:
        return str(error)
    return None


def check_shared(groups: Iterable[Sequence[str]], tensors: Mapping[str, TensorInfo], tensor: str, name: str) -> None:
    """Raise CheckpointError, which calls the folder `name`, if linears that are fused differ in their `tensor`.

    It holds one number; `groups` holds module names as `fused` gives them.
    """
    several = [group for group in groups if len(group) > 1]
    names = [f"{module}.{tensor}" for group in several for module in group]
    with TensorReader(tensors) as read:
        scales = {each: read(each).item() for each in sorted(names, key=lambda each: tensors[each].file)}
    for modules in several:
        found = {scales[f"{module}.{tensor}"] for module in modules}
        if len(found) > 1:
            raise CheckpointError(
                f"{name} gives {', '.join(modules)} different global scales {sorted(found)}, and vLLM, which fuses "
                "them, takes one for all: quantize the 16-bit model with `qerl quantize`, which shares them"
            )


SHARE = 0.25  # of the distance between results with rounded and other inputs; rounding to bfloat16 makes a twentieth
GRPO_WARNING = (
    "activations are in 4 bits: others report that GRPO does not converge so (NeMo RL, verl), and mean it for "
    "distillation and for evaluation; watch the reward, or train with activations in 16 bits"
)


def kind_of_activations(folder: Path, format: Format) -> str:
    """none, dynamic or static."""
    return format.activations(read_config(folder).get("quantization_config"))


def rounds_to_four_bits(folder: Path, format: Format) -> bool:
    """Whether the packed linears of a checkpoint round their input to 4 bits."""
    return format.four_bit_inputs and kind_of_activations(folder, format) != "none"


def read_activations(folder: Path, format: Format) -> dict[str, Activations]:
    """How each packed linear rounds its input, by module name; empty if inputs stay in 16 bits.

    Linears that engines fuse get the largest of their scales, as in vLLM. Raises CheckpointError for scales that are
    missing, or are not positive numbers.
    """
    kind, tensors = kind_of_activations(folder, format), read_tensors(folder)
    if kind == "none":
        return {}
    from qerl.formats.nvfp4.activations import Activations

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
    """Raise EngineError unless `serve(x)`, an engine's product of rows x (T, in), multiplies the rounded rows.

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


def input_scales(
    model: PreTrainedModel, modules: Sequence[str], rows: Sequence[Sequence[int]], headroom_bits: int
) -> dict[str, torch.Tensor]:
    """float32 (1,) by module name, for a 16-bit `model` on `rows` of token ids.

    Each row takes a forward pass; `headroom_bits`: by how many powers of two activations may grow.
    Raises CheckpointError for a linear whose input holds inf or NaN, or is zero throughout.
    """
    import torch

    with torch.no_grad(), _largest_inputs(model, modules) as amax:
        for ids in rows:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    return scales_of(amax, headroom_bits, f"{len(rows)} calibration rows (qat.quant_cfg.calibration)")


def scales_of(amax: Mapping[str, torch.Tensor], headroom_bits: int, rows: str) -> dict[str, torch.Tensor]:
    """float32 (1,) by module name, for the amax of each linear's input over `rows`, in words."""
    from qerl.formats.nvfp4.reference import power_of_two_scale  # it imports torch

    scales = {}
    for name, value in amax.items():
        if not 0 < (largest := value.item()) < float("inf"):
            raise CheckpointError(
                f"the input of {name} has the amax {largest:g} over {rows}, from which no scale follows: check the "
                "rows and the 16-bit model, or take dynamic scales"
            )
        scales[name] = power_of_two_scale(largest, headroom_bits)
    return scales


def with_input_scales(groups: Iterable[Tensors], scales: Mapping[str, torch.Tensor]) -> Iterator[Tensors]:
    """The tensors of `groups`, each packed linear's static scale beside its weight."""
    for group in groups:
        own = {f"{module}.{INPUT_SCALE}": scale for module, scale in scales.items() if f"{module}.{PACKED}" in group}
        yield group | own


@contextmanager
def _largest_inputs(model: PreTrainedModel, modules: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """The amax of each linear's input so far, float32 on the model's device; NaN once one was seen."""
    import torch

    amax = {name: torch.zeros((), device=model.device) for name in modules}

    def see(name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        amax[name] = torch.maximum(amax[name], inputs[0].abs().amax().float())

    # With a hook a linear is called as a module, so that the fused layers do not pass it by.
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(see, name)) for name in modules]
    try:
        yield amax
    finally:
        for hook in hooks:
            hook.remove()
