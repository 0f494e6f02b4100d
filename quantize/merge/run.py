"""`qerl merge`.

Merge an adapter that was trained through the quantizer: its run's model is exported, with the engine's bytes.

`qerl merge`: turn an adapter and its base into a PEFT folder, a BF16 model or an NVFP4 model.

    qerl merge --adapter runs/dapo_7b-20260101 --to bf16      # -> merged/dapo_7b-20260101-bf16
    qerl merge --adapter A --to nvfp4 --out DIR               # rounded again; says what rounding left of the adapter
    qerl merge --adapter A --to adapter --push-to-hub me/name # the adapter alone, with a model card
    qerl merge --adapter A --to adapter --with-start          # with the start of its base, for stock vLLM

First everything is refused that the files' headers (and the hub, before a push) show to be impossible. Then one layer
at a time is merged in float32, rounded once and written into a hidden folder, which is opened again, compared, and
moved to its place in one step. Last the effect is measured on prompts, and the report and the model card are completed.

`qerl merge`; qerl/cli/main.py registers it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, QerlError
from qerl.base.files import replace_text
from qerl.checkpoint.activations import rounds_to_four_bits
from qerl.checkpoint.adapter_file import through_quantizer
from qerl.checkpoint.base_start import START, check_start, copy_start, start_of_adapter
from qerl.checkpoint.export import check_push, push
from qerl.checkpoint.output import MERGE_REPORT, check_space, check_target, staged_folder
from qerl.checkpoint.peft_folder import TrainedOn, plain_base
from qerl.checkpoint.resolve import ModelRef, adapter_folder, describe, resolve_model
from qerl.checkpoint.shards import read_json
from qerl.cli.options import Gpu
from quantize.export.run import ExportOptions, ExportReport, export
from quantize.merge.adapter import HOLDS_START, AdapterStart, start_in_merge
from quantize.merge.base import Adapter, check_original, choose_base, read_base
from quantize.merge.card import MergeReport, run_of
from quantize.merge.options import (
    ONLY_QERL,
    MergeOptions,
    chat_line,
    only_qerl_reads,
    serve_adapter_line,
    serve_model_line,
)
from quantize.run import package_version, progress_bar, resolve_device


def export_of_adapter(options: MergeOptions, run: Path, adapter: Path, out: Path) -> ExportReport:
    """Write the model with an `adapter` of `run` as `qerl export` does, whichever of the run's folders it is in.

    Raises ConfigError for options that would give another model than the one that was trained.
    """
    asked = {"--model": options.model, "--onto": None if options.onto == "auto" else options.onto}
    for option, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value}: the adapter of {run} was trained within the packed weights of its own 16-bit "
                f"model: leave {option} out"
            )
    if options.prompts is not None:
        raise ConfigError(
            f"--prompts {options.prompts}: nothing is lost in packing the adapter of {run}, so that there is no effect "
            "to measure: leave --prompts out"
        )
    shared = {name: getattr(options, name) for name in ("push_to_hub", "public", "overwrite", "force", "device")}
    return export(ExportOptions(run, options.to, out, _step(adapter), **shared))


def _step(adapter: Path) -> int | None:
    """The step of a checkpoint, or of the run's best; None for its last."""
    if (best := adapter / "validation.json").is_file():
        return read_json(best)["step"]
    named = re.fullmatch(r"step-(\d+)", adapter.resolve().name)
    return int(named[1]) if named else None


NO_LONGER_ROUNDED = (
    "the base that the adapter was trained on rounds the inputs of its linears to 4 bits, and this model does not: it "
    "is not the policy that was trained, and only an evaluation says whether it is better or worse; "
    f"--to {formats.NVFP4.name} writes a model that rounds them"
)
NO_START = (
    "rounding takes a part of the merged weights again, and this model has no start that repairs it: for one that has, "
    f"write `qerl merge --adapter {{}} --to {formats.BF16.name}` and give its result to `qerl quantize --model`"
)
PACKAGES = ("qerl", "torch", "transformers", "peft", "compressed-tensors", "llmcompressor", "vllm")
CARD = "README.md"

logger = logging.getLogger(__name__)


def merge(options: MergeOptions) -> MergeReport | ExportReport:
    """Merge as `options` say. Raises ConfigError, CheckpointError, or DataError for `prompts` that cannot be read.

    Where the adapter was trained through the quantizer, the model is exported from its run. After an error that comes
    before the push, `out` is either as it was before or complete.
    """
    from qerl.checkpoint.adapter_file import read_adapter

    options.check()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    if options.prompts is not None and options.prompt_count:
        from quantize.merge.card import questions_in

        questions_in(options.prompts)
    folder = adapter_folder(options.adapter)
    out = options.out or Path("merged") / f"{_label(options.adapter)}-{options.to}"
    if options.to != "adapter" and (run := run_of(folder)) is not None and through_quantizer(run):
        return export_of_adapter(options, run, folder, out)
    adapter = Adapter(folder, *read_adapter(folder))
    report = _write_adapter(options, adapter, out) if options.to == "adapter" else _write_model(options, adapter, out)
    for warning in report.warnings():
        logger.warning("warning: %s", warning)
    if options.push_to_hub:
        logger.info("pushed to %s", push(out, options.push_to_hub, not options.public, "merge"))
    return report


def _label(adapter: str) -> str:
    """A name for the result: that of the run, for its folder `adapter/` too, or of the adapter folder."""
    folder = Path(adapter).expanduser().resolve()
    named = folder.parent if folder.name == "adapter" else folder
    return named.name if folder.exists() else adapter.rsplit("/", 1)[-1]


def _write_adapter(options: MergeOptions, adapter: Adapter, out: Path) -> MergeReport:
    import torch

    from quantize.merge.adapter import adapter_to_write, add_for_peft, find_base_name, write_adapter

    base = find_base_name(adapter, options.base_name or options.model)
    kept = adapter_to_write(options, adapter, base)
    made, origin = kept.adapter, kept.origin
    check_target(out, adapter.folder, options.overwrite, options.force)
    dtype = None if options.dtype == "keep" else getattr(torch, options.dtype)
    line = serve_adapter_line(out, kept.served_on, made.rank, bool(made.norms or made.of_experts))
    report = replace(
        _report(options, made, out, base, origin.base),
        start=origin.start,
        notes=(*_adapter_notes(options, made, origin), *kept.notes),
        commands={"chat": chat_line(out), **({"vllm": line} if line else {})},
    )
    with staged_folder(out) as staging:
        report = replace(report, bytes=write_adapter(made, staging, origin.base, dtype))
        add_for_peft(made, staging, origin)
        if origin.start is not None:
            copy_start(kept.start.found, staging / START, origin.start.kind)
        _write_texts(report, adapter, staging)
    return report


def _adapter_notes(options: MergeOptions, adapter: Adapter, origin: TrainedOn) -> tuple[str, ...]:
    notes = []
    if adapter.norms:
        notes.append(
            f"{len(adapter.norms)} norms were trained with the LoRA: PEFT and qerl load them (modules_to_save), vLLM "
            f"refuses such a folder; for vLLM merge to {' or '.join(each.name for each in formats.writable())}, where "
            "norms become part of the model"
        )
    if adapter.of_experts:
        notes.append(
            "the factors on experts are in the layout of PEFT's target_parameters, which PEFT and qerl load; whether "
            f"vLLM does was not tried: for vLLM merge to "
            f"{' or '.join(each.name for each in formats.writable(experts=True))}"
        )
    named = plain_base(origin) or origin.base
    if options.push_to_hub and Path(named).is_dir():
        notes.append(
            f"the pushed adapter names the folder {named} as its base, which others do not have: push the base too, "
            "and write `--base-name ID`"
        )
    return tuple(notes)


def _write_model(options: MergeOptions, adapter: Adapter, out: Path) -> MergeReport:
    from qerl.checkpoint.load import local_folder
    from quantize.merge.base import check_merged, plan_merge, total, write_merged

    exact, to = _exact(options), formats.get(options.to)
    onto, notes = choose_base(options.onto, to, exact)
    start = _start_on(exact, adapter)
    logger.info("merging %s", describe(exact))
    trained = read_base(exact.base, local_folder(exact.base))
    original = None if onto.base == exact.base else read_base(onto.base, local_folder(onto.base))
    if original is not None:
        check_original(original, trained)
    if start is not None:
        trained = replace(trained, start=start.beside(adapter))
    base = original or trained
    # A quantized model replaces the base that was trained on; a 16-bit one replaces what it was merged onto.
    plan = plan_merge(base, trained if to.quantized else base, start.change(adapter) if start else adapter, to)
    check_target(out, base.folder, options.overwrite, options.force)
    check_space(out, plan.source.output_bytes())
    device = resolve_device(options.device)
    alone = to.quantized and trained.format.name == to.name and only_qerl_reads(trained.folder)
    if alone:
        notes = (*notes, ONLY_QERL)
    elif trained.format.name != to.name and rounds_to_four_bits(trained.folder, trained.format):
        notes = (*notes, NO_LONGER_ROUNDED)
    if start is not None and to.name == formats.NVFP4.name:
        notes = (*notes, NO_START.format(shlex.quote(options.adapter)))
    report = replace(
        _report(options, adapter, out, exact.base, onto.base),
        start=start and start.trained,
        notes=notes,
        commands={"chat": chat_line(out), **({} if alone else {"vllm": serve_model_line(out)})},
    )
    with staged_folder(out) as staging, progress_bar() as progress:
        size = write_merged(plan, staging, device, progress.track)
        sums = check_merged(plan, staging, device, progress.track)
        layers = tuple(part.survival() for part in sums)
        report = replace(report, bytes=size, survival=total(sums), layers=layers)
        _write_texts(report, adapter, staging)
    return _with_effect(options, exact, adapter, report)


def _exact(options: MergeOptions) -> ModelRef:
    if options.model is None:
        return resolve_model(options.adapter)
    return resolve_model(options.model, adapter=options.adapter)


def _start_on(exact: ModelRef, adapter: Adapter) -> AdapterStart | None:
    """The start of an adapter that is merged with the base `exact`; None if there is none, or none acts on that base.

    Raises CheckpointError for a base that is not the start's.
    """
    trained = start_of_adapter(adapter.folder)
    if trained is None or (trained.kind == "frozen" and not formats.get(exact.format).quantized):
        return None
    if not formats.get(exact.format).quantized:
        raise CheckpointError(HOLDS_START.format(adapter.folder, exact.base))
    start = start_in_merge(adapter.folder, exact.base)
    check_start(start.found, exact.base)
    return start


def _with_effect(options: MergeOptions, exact: ModelRef, adapter: Adapter, report: MergeReport) -> MergeReport:
    """Measure the effect on prompts and complete report and card. If it cannot be measured here, nothing is lost."""
    if not options.prompt_count:
        return report
    from quantize.merge.card import measure_effect

    logger.info("measuring the effect on prompts (--prompt-count 0 leaves it out)")
    limits = (options.prompt_count, options.max_new_tokens)
    try:
        effect = measure_effect(exact, report.out, limits, options.prompts)
    except (QerlError, RuntimeError) as error:
        logger.warning("warning: %s is complete, but its effect could not be measured: %s", report.out, error)
        return report
    report = replace(report, effect=effect)
    _write_texts(report, adapter, report.out)
    return report


def _report(options: MergeOptions, adapter: Adapter, out: Path, base: str, onto: str) -> MergeReport:
    return MergeReport(
        out=out,
        to=options.to,
        adapter=str(adapter.folder),
        base=base,
        onto=onto,
        rank=adapter.rank,
        scaling=adapter.scaling,
        trained_norms=len(adapter.norms),
        bytes=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: package_version(package) for package in PACKAGES},
    )


def _write_texts(report: MergeReport, adapter: Adapter, folder: Path) -> None:
    """Write merge_report.json and the model card, each whole or not at all."""
    from quantize.merge.card import write_card

    replace_text(folder / MERGE_REPORT, json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    write_card(report, adapter.folder, folder / CARD)


def merge_command(options: MergeOptions, gpu: Gpu = None) -> None:
    """Turn an adapter into a folder to publish: a PEFT adapter, a merged BF16 model, or a merged NVFP4 model.

    Prints how much of the adapter is left after rounding, and how to serve the result.
    """
    from qerl.base.printable import SafeConsole
    from qerl.cli.next_step import say_next

    report = merged(options, gpu)
    console = SafeConsole()
    console.print(report.table())
    first, *others = report.commands.values()
    say_next(first)
    for command in others:
        console.print(f"or: {command}", soft_wrap=True, highlight=False, markup=False)


def merged(options: MergeOptions, gpu: int | None = None) -> MergeReport:
    """The report of the adapter merged on one card, or on the CPU."""
    from qerl.base.devices import choose_card

    if options.device in ("auto", "cuda"):
        choose_card(gpu=gpu)
    elif gpu is not None:
        raise ConfigError(f"--gpu {gpu} and --device {options.device} name two devices: leave one of them out")
    return merge(options)
