"""Which adapter a merge to `adapter` writes: as it was trained, with its start, or for the 16-bit model of its base.

    start      --to adapter      --with-start                --onto original
    none       as it is          refused                     refused: it fits that model as it is
    frozen     as it is          start and adapter as one    refused: it fits that model as it is
    trained    as it is          refused: it has it          what the training changed

A frozen start is a part of the model that was trained on, but stock vLLM knows no start.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.base_start import start_of_adapter
from qerl.checkpoint.folder import EMBEDDED, model_of_adapter
from qerl.checkpoint.peft_folder import TrainedOn, plain_base, trained_on
from quantize.merge.adapter import find_base_name
from quantize.merge.base import Adapter
from quantize.merge.options import MergeOptions
from quantize.merge.original import original_name
from quantize.merge.start import HOLDS_START, AdapterStart, start_in_merge


@dataclass(frozen=True)
class WrittenAdapter:
    """An adapter to write, the base that it is for, and the base on which stock vLLM may serve it, if any."""

    adapter: Adapter
    origin: TrainedOn
    served_on: str | None
    start: AdapterStart | None = None
    notes: tuple[str, ...] = ()


def adapter_to_write(options: MergeOptions, adapter: Adapter, base: str) -> WrittenAdapter:
    """The adapter that `options` ask for; `base` is the one to name, unless it is for the 16-bit model.

    Raises ConfigError for what the adapter's kind does not have, CheckpointError if its start is nowhere.
    """
    trained = start_of_adapter(adapter.folder)
    if trained is None:
        _refuse(options, f"{adapter.folder} was trained without a start")
        return WrittenAdapter(adapter, trained_on(base), base)
    origin = _origin(adapter, base)
    if trained.kind == "trained" and options.onto != "original" and not origin.quantized:
        raise CheckpointError(HOLDS_START.format(adapter.folder, origin.base))
    start = start_in_merge(adapter.folder, find_base_name(adapter, options.model))
    if not start.frozen:
        return _that_holds_its_start(options, adapter, origin, start)
    if not origin.quantized:  # W + s B A
        _refuse(options, f"no start acts on the 16-bit {base}")
        return WrittenAdapter(adapter, origin, base)
    if options.with_start:
        return _stacked(adapter, origin, start)
    _refuse(options, f"{adapter.folder} was trained beside a frozen start")
    origin = replace(origin, start=start.trained)
    return WrittenAdapter(adapter, origin, plain_base(origin), start, _not_for_vllm(options, adapter, origin))


def _refuse(options: MergeOptions, why: str) -> None:
    if options.with_start:
        raise ConfigError(f"--with-start: {why}: leave it out")
    if options.onto == "original":
        raise ConfigError(
            f"--onto original: {why}, so that it fits the 16-bit model as it is, and an adapter folder is an exact "
            "copy: leave it out"
        )


def _origin(adapter: Adapter, base: str) -> TrainedOn:
    """The base to name. One that is not a folder here is taken to have the format of the base that was trained on."""
    if base in EMBEDDED or Path(base).is_dir():
        return trained_on(base)
    return TrainedOn(base, model_of_adapter(adapter.folder)[1] or formats.NVFP4.name)


def _stacked(adapter: Adapter, origin: TrainedOn, start: AdapterStart) -> WrittenAdapter:
    made = start.stacked(adapter)
    note = (
        f"one adapter of rank {made.settings['r']}, of which {start.trained.rank} are the start; it is for "
        f"{origin.base} alone, since the 16-bit model does not need that repair"
    )
    # It holds the start as an adapter does that was trained from it, so that it is merged and published like one.
    origin = replace(origin, start=replace(start.trained, kind="trained"))
    return WrittenAdapter(made, origin, origin.base, start, (note,))


def _that_holds_its_start(
    options: MergeOptions, adapter: Adapter, origin: TrainedOn, start: AdapterStart
) -> WrittenAdapter:
    if options.with_start:
        raise ConfigError(f"--with-start: {adapter.folder} began at its start and holds it: leave it out")
    if options.onto != "original":
        return WrittenAdapter(adapter, replace(origin, start=start.trained), origin.base, start)
    made = start.change(adapter)
    name = options.base_name or original_name(find_base_name(adapter, options.model))
    name = find_base_name(adapter, name)
    note = (
        f"what the training changed, as an adapter of rank {made.settings['r']} for the 16-bit {name}; the policy that "
        "was trained has a rest of the rounding error too, so that the two differ slightly"
    )
    return WrittenAdapter(made, trained_on(name), name, None, (note,))


def _not_for_vllm(options: MergeOptions, adapter: Adapter, origin: TrainedOn) -> tuple[str, ...]:
    if adapter.norms or adapter.of_experts:
        return ()  # vLLM does not load these as an adapter anyway
    line = f"qerl merge --adapter {shlex.quote(options.adapter)} --to adapter --with-start"
    return (f"stock vLLM knows no start: for {origin.base} there write `{line}`, which makes one adapter of both",)
