"""llm-compressor: import it, forward its log to ours, take the scheme NVFP4A16 from it, and run AWQ and GPTQ by it.

Importing llm-compressor takes seconds (it imports datasets, transformers' model code and torch.distributed), sets up
loguru and writes to stdout. So it is imported on first use, with its log switched off during the import.

In its sequential pipeline the model is in main memory, and one decoder layer on the GPU. `awq` rescales channels by
activation statistics (arXiv 2306.00978) and then rounds to nearest. It changes norms and the weights next to them too,
in a way that before rounding the model still computes the same. `gptq` rounds column by column and moves the error of
each to the remaining columns (arXiv 2210.17323). The tensors we write are those that llm-compressor would save; names,
other tensors and the config come from the source, as with rtn.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as once
from typing import TYPE_CHECKING

import torch

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, MissingExtraError
from qerl.checkpoint.experts import GATE_UP as MLP
from qerl.checkpoint.experts import QKVZ, Decoder
from qerl.checkpoint.source import Source
from quantize.calibration import Calibration
from quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SCHEME = formats.DEFAULT.scheme
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LOG_SWITCH = "LLM_COMPRESSOR_LOG_DISABLED"
NOISE = (  # repeated many times; we say it once
    "No accelerator available",
    "Disabling tokenizer parallelism",
    "MoE is being linearized after loading",
)

logger = logging.getLogger(__name__)


@once
def load_compressor() -> None:
    """Import llm-compressor and forward its log, from WARNING up, to the logger `quantize.compressor`."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise MissingExtraError("llmcompressor", "quantize")
    with _environment(LOG_SWITCH, "true"):
        from llmcompressor.logger import LoggerConfig, configure_logger
    configure_logger(LoggerConfig(console_log_level=None))
    from llmcompressor.observers.helpers import FUSED_LAYER_NAMES

    if QKVZ not in FUSED_LAYER_NAMES:  # it does not know that vLLM multiplies by these at once (llmcompressor 0.14)
        FUSED_LAYER_NAMES.append(QKVZ)

    import loguru

    loguru.logger.add(_to_logging, level="WARNING", format="{message}", filter=_worth_saying)


def _worth_saying(record: dict) -> bool:
    """False for repeated lines and for METRIC lines, of which each linear has two, at a level above WARNING."""
    return record["level"].name != "METRIC" and not record["message"].startswith(NOISE)


def _to_logging(message: str) -> None:
    logger.warning("llm-compressor: %s", str(message).strip())


@once
def power_of_two_observer() -> str:
    """Register an observer of weights whose global scales are powers of two; returns its name for a modifier."""
    load_compressor()
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


def check_device(device: torch.device) -> None:
    """Raise ConfigError unless `device` is the one that llm-compressor calibrates on, which cannot be chosen."""
    load_compressor()
    from llmcompressor.utils.dev import get_main_device

    main = get_main_device()
    if device.type != main.type or (device.index or 0) != (main.index or 0):
        raise ConfigError(
            f"--device {device} cannot be used with awq and gptq, which llm-compressor runs on {main}: leave --device "
            "out, and choose among several GPUs by CUDA_VISIBLE_DEVICES"
        )


def calibrate(
    source: Source, tokenizer: PreTrainedTokenizerBase, calibration: Calibration | None, options: QuantizeOptions
) -> PreTrainedModel:
    """The model with quantization parameters on its linears; their `weight` is what will be encoded.

    `options` have a method of llm-compressor's. AWQ's search for its own scales is under amax in any case.
    `calibration` None is for rtn with an observer that looks at no inputs.
    """
    load_compressor()
    from llmcompressor import oneshot

    model = _load(source)
    if source.decoder.has_experts:
        from llmcompressor.modeling.moe.linearize import linearize_moe

        linearize_moe(model)  # each expert has linears of its own, and rows go through all of them
    ignored = [source.decoder.linearized(module) for module in source.unquantized()]
    rounding = {"targets": "Linear", "scheme": SCHEME, "ignore": ignored}
    observer = power_of_two_observer() if options.global_scale == "pow2" else options.observer
    if observer is not None:
        rounding["weight_observer"] = observer
    with_rows = {}
    if calibration is not None:
        with_rows = {
            "dataset": _batches(calibration, options.batch_size),
            "num_calibration_samples": len(calibration.sequences),
            "max_seq_length": len(calibration.sequences[0]),
            "pipeline": "sequential",
        }
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=_modifiers(options.method, rounding, source.decoder),
        trust_remote_code_model=source.trust_remote_code,
        **with_rows,
    )
    return model


def _load(source: Source) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # float32 on a CPU, where bfloat16 products take up to 20 times as long, and for float16 files: see
    # quantize.one_pass.weight_for_scales.
    half = source.tensors[f"{source.quantized[0]}.weight"].dtype == "BF16" and torch.accelerator.is_available()
    dtype = torch.bfloat16 if half else torch.float32
    try:
        return AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, use_safetensors=True, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source.name} cannot be loaded by transformers: {error}") from error


def _modifiers(method: str, rounding: dict, decoder: Decoder) -> list:
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    if method != "awq":
        return [(GPTQModifier if method == "gptq" else QuantizationModifier)(**rounding)]

    class UnpinnedAWQModifier(AWQModifier):
        """AWQ that also runs without an accelerator.

        llmcompressor 0.14.0.1 always pins its cached activations in memory (modifiers/transform/awq/base.py,
        _apply_smoothing), which torch refuses without an accelerator. Remove this class when llmcompressor checks for
        one first; tests/quantize/test_calibrated.py fails then.
        """

        def on_sequential_epoch_end(self, state: object, event: object, **kwargs: object) -> None:
            for cache in self._parent_args_cache.values():
                cache.pin_memory = lambda batch_index: None
            super().on_sequential_epoch_end(state, event, **kwargs)

    mappings = _mappings(decoder) if decoder.has_experts else None
    if not torch.accelerator.is_available():
        return [UnpinnedAWQModifier(mappings=mappings), QuantizationModifier(**rounding)]
    # At 256 x 2048 tokens the cached inputs of a 32B layer are tens of GB, so they wait in main memory.
    return [AWQModifier(mappings=mappings, offload_device=torch.device("cpu")), QuantizationModifier(**rounding)]


def _mappings(decoder: Decoder) -> list:
    """What AWQ rescales in layers with experts: a norm together with all that read it, which the router does too.

    llm-compressor 0.14 has such mappings for some classes of models. For others it would rescale the norm and leave the
    router as it is, which then chooses other experts.
    """
    from llmcompressor.modifiers.transform.awq import AWQMapping

    found = [
        AWQMapping("re:.*input_layernorm$", ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]),
        AWQMapping("re:.*v_proj$", ["re:.*o_proj$"]),
        AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]),
    ]
    for layer in range(decoder.layers):
        inside = rf"re:model\.layers\.{layer}\.mlp\."
        parts = ("gate", r"experts\..*gate_proj", r"experts\..*up_proj") if layer in decoder.sparse else MLP
        readers = [f"{inside}{part}$" for part in parts]
        found.append(AWQMapping(rf"re:model\.layers\.{layer}\.post_attention_layernorm$", readers))
    return found


def _batches(calibration: Calibration, batch_size: int) -> torch.utils.data.DataLoader:
    rows = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.long)}
        for ids in calibration.sequences
    ]
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)


def calibrated_groups(
    source: Source, config: QuantizationConfig, model: PreTrainedModel
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time; the model stays unchanged."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(config.format)
    scheme = config.config_groups["group_0"]
    for names in source.groups():
        written = {}
        for name in names:
            if name in source.chosen:
                module = source.chosen[name]
                state = _quantization_state(model, source.decoder.linearized(module))
                for part, tensor in compressor.compress(state, scheme).items():
                    written[f"{module}.{part}"] = tensor.cpu().contiguous()
            else:
                written[name] = dense_tensor(source, model, name)
        yield written


def _quantization_state(model: PreTrainedModel, module: str) -> dict[str, torch.Tensor]:
    parts = model.get_submodule(module)
    names = ("weight", "weight_scale", "weight_global_scale", "weight_zero_point")
    return {name: getattr(parts, name).detach() for name in names if getattr(parts, name, None) is not None}


def dense_tensor(source: Source, model: PreTrainedModel, name: str) -> torch.Tensor:
    """A tensor of the calibrated model on the CPU, in the source's dtype; for a quantized linear before encoding."""
    module, _, tensor = name.rpartition(".")
    value = getattr(model.get_submodule(source.decoder.linearized(module)), tensor).detach().cpu()
    if name in source.chosen:
        return value
    return value.to(DTYPES[source.tensors[name].dtype]).contiguous()
