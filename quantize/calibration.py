"""Calibration rows and what the model sees of them.

Rows of a file, task or hub data set, cut into sequences of equal length to calibrate on, and others to measure on.

Rows are shuffled with a fixed seed, rendered with the model's chat template, joined, and cut every `sequence_length`
tokens. So `256 x 2048` is that many tokens however long the rows are, and no padding enters the statistics. The first
rows are held out for the measurement, so that they do not depend on how many others are used.

The rows that ship with qerl (`mixed`, see rows/README.md) are not shuffled: their three kinds take turns in the file,
so that what is held out and what is used are mixed, however few they are.

AWQ and GPTQ by llm-compressor's sequential pipeline: the model is in main memory, one decoder layer on the GPU.

`awq` rescales channels by activation statistics (arXiv 2306.00978) and then rounds to nearest. It changes norms and the
weights next to them too, in a way that before rounding the model still computes the same. `gptq` rounds column by
column and moves the error of each to the remaining columns (arXiv 2210.17323). The tensors we write are those that
llm-compressor would save; names, other tensors and the config come from the source, as with rtn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.checkpoint.experts import GATE_UP as MLP
from qerl.checkpoint.experts import Decoder
from qerl.checkpoint.source import Source
from qerl.data.rows import local_rows
from qerl.data.sequences import fields_of, shuffled_rows, tokens_of
from quantize.compressor import SCHEME, load_compressor, power_of_two_observer
from quantize.output_error import Rows

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


HELD_OUT = 16  # sequences to measure on
MIXED = "mixed"  # the name of the rows that ship with qerl; a file or folder of that name is ./mixed
OWN_TASK = "arith"  # what the embedded models were trained on
ENOUGH_KNOWN = 0.9  # of the shipped rows' tokens; real tokenizers have 0.998, the embedded models' 0.65
JUDGED_ROWS = 28  # the first rows, by which a tokenizer is judged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """Token sequences of one length, and what they were made of."""

    data: str
    sequences: list[list[int]]  # to calibrate on
    rows: int  # that were used
    unusable_rows: int
    held_out: list[list[int]] = field(default_factory=list)  # to measure on, from other rows

    def measured(self) -> Rows:
        """The rows to measure on: those held out, or if there are none those of the calibration."""
        return Rows(self.data, self.held_out or self.sequences, bool(self.held_out))

    def summary(self) -> dict:
        """The entry of quantize_report.json."""
        length = len((self.sequences or self.held_out)[0])
        return {
            "data": self.data,
            "sequences": len(self.sequences),
            "sequence_length": length,
            "tokens": len(self.sequences) * length,
            "rows": self.rows,
            "unusable_rows": self.unusable_rows,
        }


def shipped_rows() -> Path:
    """The file of the calibration rows that ship with qerl."""
    return Path(__file__).with_name("rows") / "mixed.jsonl.gz"


def default_data(tokenizer: PreTrainedTokenizerBase) -> str:
    """What to calibrate on if nothing is named: `mixed`, or `arith` if the tokenizer knows that alone."""

    def known(data: str) -> float:
        return share_known(tokenizer, [tokens_of(row, tokenizer) for row in _rows(data)[:JUDGED_ROWS]])

    if (share := known(MIXED)) >= ENOUGH_KNOWN or known(OWN_TASK) < ENOUGH_KNOWN:
        return MIXED
    logger.info("calibrating on task %s: the tokenizer spells %.0f%% of text", OWN_TASK, 100 * (1 - share))
    return OWN_TASK


def share_known(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int]]) -> float:
    """The share of the rows' tokens that are the tokenizer's words and signs; 0 if there are no tokens.

    The others are its unknown token, bytes of a character, and single letters that spell a word: the tokens of a text
    of another kind than the tokenizer was made for.
    """
    texts = {token: tokenizer.decode([token]) for row in rows for token in row}
    tokens = known = 0
    for row in rows:
        spelled = {place for place, pair in enumerate(pairwise(row)) if _spell(*(texts[token] for token in pair))}
        spelled |= {place + 1 for place in spelled}
        tokens += len(row)
        known += sum(
            token != tokenizer.unk_token_id and "\ufffd" not in texts[token] and place not in spelled
            for place, token in enumerate(row)
        )
    return known / tokens if tokens else 0.0


def _spell(first: str, second: str) -> bool:
    """Whether both are single letters of one word."""
    return second.isalpha() and len(second) == 1 and first.strip().isalpha() and len(first.strip()) == 1


def load_calibration(
    data: str, tokenizer: PreTrainedTokenizerBase, size: int, sequence_length: int, held_out: int = 0
) -> Calibration:
    """Up to `size` sequences of `sequence_length` tokens from `data` (a file, a task, a hub id, or `mixed`).

    Up to `held_out` more come from other rows; if there are few rows, an eighth of all sequences, or none of one.
    Raises DataError if the data cannot be read, has no usable row, or too few tokens for one sequence.
    """
    rows: list[list[int]] = []
    held: list[int] = []
    tokens: list[int] = []
    unusable = 0
    example: Any = None
    for row in _rows(data):
        if not (ids := tokens_of(row, tokenizer)):
            unusable, example = unusable + 1, row
            continue
        rows.append(ids)
        part = held if len(held) < held_out * sequence_length else tokens
        part += ids
        if len(tokens) >= size * sequence_length and len(held) >= held_out * sequence_length:
            break
    _check_tokens(data, rows, sequence_length, (unusable, example))
    if held_out and len(tokens) < size * sequence_length:
        held, tokens = _few_rows(rows, held_out, sequence_length)
    sequences = _cut(tokens, size, sequence_length)
    if len(sequences) < size and data != MIXED:  # nobody chose how many of those there are
        found = len(sequences)
        logger.warning("%s is enough for %d sequences of %d tokens, not for %d", data, found, sequence_length, size)
    if unusable:
        logger.warning("%s: %d rows have no usable text (fields of one: %s)", data, unusable, fields_of(example))
    return Calibration(data, sequences, len(rows), unusable, _cut(held, held_out, sequence_length))


def _rows(data: str) -> list[Any]:
    """The rows in the order in which they are used."""
    if data == MIXED:
        return [row for _, row in local_rows(str(shipped_rows()), "train")]
    return shuffled_rows(data, "--calibration")


def _check_tokens(data: str, rows: list[list[int]], sequence_length: int, unusable: tuple[int, Any]) -> None:
    """Raise DataError unless the rows are enough for one sequence."""
    count, example = unusable
    if not rows:
        raise DataError(
            f"{data}: none of {count} rows can be used for calibration (fields of one: {fields_of(example)}): a row "
            "needs `messages`, `text`, or a question with an answer"
        )
    tokens = sum(map(len, rows))
    if tokens < sequence_length:
        raise DataError(
            f"{data} gives {tokens} tokens from {len(rows)} rows, less than one sequence of {sequence_length}: give "
            f"more rows, or write --sequence-length {tokens} or less"
        )


def _few_rows(rows: list[list[int]], held_out: int, sequence_length: int) -> tuple[list[int], list[int]]:
    """The tokens to hold out and those to use, of rows that are fewer than was asked for."""
    there = sum(map(len, rows)) // sequence_length
    wanted = min(held_out, max(1, there // 8)) if there > 1 else 0
    held: list[int] = []
    tokens: list[int] = []
    for ids in rows:
        part = held if len(held) < wanted * sequence_length else tokens
        part += ids
    if len(tokens) < sequence_length:  # one long row
        return [], [token for ids in rows for token in ids]
    return held, tokens


def _cut(tokens: list[int], size: int, length: int) -> list[list[int]]:
    return [tokens[start : start + length] for start in range(0, min(size, len(tokens) // length) * length, length)]


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


@dataclass(frozen=True)
class Recipe:
    """What llm-compressor does with each layer."""

    method: str  # rtn, awq or gptq
    global_scale: str = "amax"  # or pow2; AWQ's search for its own scales is under amax in any case
    batch_size: int = 1
    observer: str | None = None  # of block scales, for rtn and gptq; None: that of the scheme


def calibrate(
    source: Source, tokenizer: PreTrainedTokenizerBase, calibration: Calibration | None, recipe: Recipe
) -> PreTrainedModel:
    """The model with quantization parameters on its linears; their `weight` is what will be encoded.

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
    observer = power_of_two_observer() if recipe.global_scale == "pow2" else recipe.observer
    if observer is not None:
        rounding["weight_observer"] = observer
    with_rows = {}
    if calibration is not None:
        with_rows = {
            "dataset": _batches(calibration, recipe.batch_size),
            "num_calibration_samples": len(calibration.sequences),
            "max_seq_length": len(calibration.sequences[0]),
            "pipeline": "sequential",
        }
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=_modifiers(recipe.method, rounding, source.decoder),
        trust_remote_code_model=source.trust_remote_code,
        **with_rows,
    )
    return model


def _load(source: Source) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    # float32 on a CPU, where bfloat16 products take up to 20 times as long, and for float16 files: see
    # quantize.rounding.weight_for_scales.
    half = source.tensors[f"{source.quantized[0]}.weight"].dtype == "BF16" and torch.accelerator.is_available()
    dtype = torch.bfloat16 if half else torch.float32
    try:
        return AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, use_safetensors=True, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source.folder} cannot be loaded by transformers: {error}") from error


def _modifiers(method: str, rounding: dict, decoder: Decoder) -> list:
    import torch
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
    import torch

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
    return value.to(_torch_dtype(source.tensors[name].dtype)).contiguous()


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]
