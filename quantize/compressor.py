"""llm-compressor's methods.

Static scales of activations, from each linear's inputs over calibration rows, one decoder layer in memory at a time.

They are what a run with `nvfp4_w4a4_static` computes with the whole model (`qerl.checkpoint.activations`): powers of
two with head room, for rows that the calibration has not seen and for training.

The experts of a layer as linears of their own, each of which can be watched and lent the weights of a checkpoint.

transformers 5.17 multiplies by two tensors that hold all experts of a layer. llm-compressor's `linearize_moe` takes
such tensors apart; the modules here are made without weights.

The text part of a model for pictures and text, as `qerl quantize` reads it.

Rounding to nearest takes the part's tensors where they are. Rows have to go through a model, and transformers opens a
folder as its config says; so for them the part is first written as a text model of its own, in 16 bits.

The entry to llm-compressor: import it, forward its log to ours, and take the scheme NVFP4A16 from it.

Importing llm-compressor takes seconds (it imports datasets, transformers' model code and torch.distributed), sets up
loguru and writes to stdout. So it is imported on first use, with its log switched off during the import.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from qerl import formats
from qerl.base.errors import MissingExtraError
from qerl.checkpoint.activations import scales_of
from qerl.checkpoint.experts import LINEARIZED, Decoder
from qerl.checkpoint.output import check_space, copy_small_files, write_json, write_weights
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_tensors
from qerl.checkpoint.source import Source
from qerl.checkpoint.verify import ReadTensor
from quantize.one_pass import LayeredModel

HEADROOM_BITS = 2  # as in a run (qat.quant_cfg.weights.headroom_bits)


def streamed_input_scales(
    source: Source, read: ReadTensor, rows: Sequence[Sequence[int]], device: torch.device, advance: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """float32 (1,) by quantized module of `source`, whose tensors `read` gives, on `rows` of token ids.

    Linears that read the same input, as those which engines fuse do, have the same scale. `advance` is called after
    each layer. Raises CheckpointError for inputs that hold inf or NaN, or are zero throughout.
    """
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    amax = {name: torch.zeros((), device=device) for name in source.quantized}

    def see(module: str, inputs: torch.Tensor) -> None:
        if module in amax:
            amax[module] = torch.maximum(amax[module], inputs.abs().amax().float())

    def load(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: read(name).to(device, dtype) for name in names}

    before, *layers, after = source.groups()
    with torch.inference_mode():
        model = LayeredModel(source, dtype, device)
        hidden = model.embed([torch.tensor([row], device=device) for row in rows], load(before + after))
        for number, names in enumerate(layers):
            model.step(number, load(names), hidden, see)
            advance()
    return scales_of(amax, HEADROOM_BITS, f"{len(rows)} calibration sequences (--calibration)")


class LinearExperts(nn.ModuleList):
    """Stands in for the experts module of a layer; its linears are named as `Decoder.linearized` says."""

    def __init__(self, decoder: Decoder, act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(_expert(decoder, dtype) for _ in range(decoder.experts))
        self._act = act

    def forward(self, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs for each token; an expert sees only the tokens it is for."""
        total_TD = torch.zeros_like(hidden_TD)
        for number, expert in enumerate(self):
            tokens, place = torch.where(chosen_TK == number)
            if len(tokens):
                x = hidden_TD[tokens]
                out = expert["down_proj"](self._act(expert["gate_proj"](x)) * expert["up_proj"](x))
                total_TD.index_add_(0, tokens, (out * weights_TK[tokens, place, None]).to(total_TD.dtype))
        return total_TD


def take_apart_(model: nn.Module, decoder: Decoder) -> None:
    """Replace the experts of each layer of a decoder that is on the meta device."""
    for layer in decoder.sparse:
        block = model.get_submodule(f"model.layers.{layer}.mlp")
        block.experts = LinearExperts(decoder, block.experts.act_fn, block.experts.down_proj.dtype)


def _expert(decoder: Decoder, dtype: torch.dtype) -> nn.ModuleDict:
    gate, up, down = LINEARIZED
    shapes = {gate: (decoder.hidden, decoder.width), up: (decoder.hidden, decoder.width)}
    shapes[down] = (decoder.width, decoder.hidden)
    return nn.ModuleDict(
        {name: nn.Linear(*shape, bias=False, device="meta", dtype=dtype) for name, shape in shapes.items()}
    )


logger = logging.getLogger(__name__)


@contextmanager
def text_model(source: Source, beside: Path, rows: bool) -> Iterator[Source]:
    """A source that holds a text part, checked against its config.

    With `rows` it is a copy in a hidden folder beside `beside`, which is deleted at the end of the block. Raises
    CheckpointError if the config does not fit, or if there is no space.
    """
    from qerl.checkpoint.load import check_config_fits

    logger.info("%s: only its text part is written, as a text model (%s)", source.name, source.config["model_type"])
    where = {"dir": beside.absolute().parent, "prefix": f".{beside.name}-text-"} if rows else {}
    with TemporaryDirectory(**where) as name:
        folder = Path(name)
        write_json(folder / "config.json", source.config)
        check_config_fits(folder, source.tensors)
        yield _copied(source, folder) if rows else source


def _copied(source: Source, folder: Path) -> Source:
    """The text part in `folder`, which has its config."""
    check_space(folder, source.size_bytes())
    with TensorReader(source.tensors) as read:
        write_weights(folder, ({name: read(name) for name in group} for group in source.groups()))
    copy_small_files(source.folder, folder)
    return replace(source, folder=folder, tensors=read_tensors(folder), part=False)


SCHEME = formats.DEFAULT.scheme
LOG_SWITCH = "LLM_COMPRESSOR_LOG_DISABLED"
NOISE = (  # repeated many times; we say it once
    "No accelerator available",
    "Disabling tokenizer parallelism",
    "MoE is being linearized after loading",
)


def check_installed() -> None:
    """Raise MissingExtraError unless llm-compressor is installed. Does not import it."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise MissingExtraError("llmcompressor", "quantize")


@cache
def load_compressor() -> None:
    """Import llm-compressor and forward its log, from WARNING up, to the logger `quantize.compressor`."""
    check_installed()
    with _environment(LOG_SWITCH, "true"):
        from llmcompressor.logger import LoggerConfig, configure_logger
    configure_logger(LoggerConfig(console_log_level=None))

    import loguru

    loguru.logger.add(_to_logging, level="WARNING", format="{message}", filter=_worth_saying)


def _worth_saying(record: dict) -> bool:
    """False for repeated lines and for METRIC lines, of which each linear has two, at a level above WARNING."""
    return record["level"].name != "METRIC" and not record["message"].startswith(NOISE)


def _to_logging(message: str) -> None:
    logger.warning("llm-compressor: %s", str(message).strip())


@cache
def power_of_two_observer() -> str:
    """Register an observer of weights whose global scales are powers of two; returns its name for a modifier."""
    load_compressor()
    import torch
    from llmcompressor.observers import Observer
    from llmcompressor.observers.min_max import MemorylessMinMaxObserver

    from qerl.formats.nvfp4.reference import power_of_two_scale

    name = "qerl_power_of_two"

    @Observer.register(name)
    class PowerOfTwoObserver(MemorylessMinMaxObserver):
        """Block scales as llm-compressor has them, under another global scale."""

        def get_global_scale(self) -> torch.Tensor:
            of_fused = self.fusion_handler.get_fused_statistics()
            bounds = [bound.abs().max() for statistics in of_fused for bound in statistics.values()]
            amax = torch.stack(bounds).max()
            return power_of_two_scale(amax).to(amax.device)

    return name


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
