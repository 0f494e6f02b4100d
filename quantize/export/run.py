"""`qerl export` (alias `qerl merge`): turn a run or an adapter into a folder to serve or publish (docs/export.md).

    qerl export --run runs/qat_7b-20260101                    # -> exported/qat_7b-20260101-nvfp4, as it was trained
    qerl export --run runs/dapo_7b-20260101 --to bf16         # the adapter, merged into its base

First everything is refused that the files' headers (and the hub, before a push) show to be impossible. Then one layer
at a time is written into a hidden folder, which is opened again, compared, and moved to its place in one step. What was
trained through the quantizer is packed by the format's own arithmetic under the global scales of RUN/base, and compared
bit by bit. An adapter is merged in float32 and rounded once; last its effect is measured on prompts.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, QerlError
from qerl.base.files import replace_text
from qerl.checkpoint import folder as sealed
from qerl.checkpoint.activations import drops_inputs, rounds_to_four_bits
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import START, check_start, copy_start, start_of_adapter
from qerl.checkpoint.export import Masters, check_push, push, read_trained, write_trained
from qerl.checkpoint.folder import (
    BASE,
    REPORT,
    STEP,
    checkpoint_of,
    embedded_folder,
    is_text_part,
    kind_of_run,
    resting_kind,
)
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.output import (
    EXPORT_REPORT,
    MERGE_REPORT,
    check_space,
    check_target,
    list_files,
    staged_folder,
    write_json,
)
from qerl.checkpoint.peft_folder import TrainedOn, plain_base
from qerl.checkpoint.resolve import ModelRef, adapter_folder, describe, resolve_model, run_of_adapter, switches_for
from qerl.checkpoint.shards import read_json
from qerl.checkpoint.source import by_layer
from quantize.export.card import write_card
from quantize.export.options import (
    GGUF,
    ONLY_QERL,
    TARGETS,
    ExportOptions,
    chat_line,
    gguf_lines,
    only_qerl_reads,
    serve_adapter_line,
    serve_model_line,
    served_by_vllm,
)
from quantize.export.report import ExportReport, MergeReport
from quantize.report import made_by
from quantize.run import progress_bar, resolve_device, take_card

NO_LONGER_ROUNDED = (
    "the base that the adapter was trained on rounds the inputs of its linears to 4 bits, and this model does not: it "
    "is not the policy that was trained, and only an evaluation says whether it is better or worse; "
    f"--to {formats.NVFP4.name} writes a model that rounds them"
)
REPACKED = (
    f"the base is in {{}}, and all its packed linears are written in {{}}, which rounds them again: --to "
    f"{formats.BF16.name} keeps what was trained"
)
DROPS_INPUTS = (
    "{0} has scales for rounded activations, which other engines use and the training left out: served there, the "
    f"adapter would act on another model; `qerl merge --adapter {{1}} --to {formats.BF16.name}` writes the trained one"
)
NO_START = (
    "rounding takes a part of the merged weights again, and this model has no start that repairs it: for one that has, "
    f"write `qerl merge --adapter {{}} --to {formats.BF16.name}` and give its result to `qerl quantize --model`"
)
CARD = "README.md"

if TYPE_CHECKING:
    from quantize.export.adapter import AdapterStart
    from quantize.export.base import Adapter

logger = logging.getLogger(__name__)


def exported(options: ExportOptions, gpu: int | None = None) -> ExportReport | MergeReport:
    """The report of what was written on one card, or on the CPU."""
    take_card(options.device, gpu)
    return export(options)


def merged(options: ExportOptions, gpu: int | None = None) -> ExportReport | MergeReport:
    """The same as `exported`, into merged/ unless the options name a folder."""
    return exported(options if options.to is None else replace(options, out=options.folder("merged")), gpu)


def export(options: ExportOptions) -> ExportReport | MergeReport:
    """Export as `options` say. Raises ConfigError, CheckpointError, or DataError for `prompts` that cannot be read.

    After an error that comes before the push, `out` is either as it was before or complete.
    """
    options.check()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    if options.prompts is not None and options.prompt_count:
        from quantize.export.effect import questions_in

        questions_in(options.prompts)
    report = (_write_gguf if options.to == GGUF else _write)(options)
    for warning in report.warnings():
        logger.warning("warning: %s", warning)
    if options.push_to_hub:
        logger.info("pushed to %s", push(report.out, options.push_to_hub, not options.public))
    return report


def _write(options: ExportOptions, copies: int = 1) -> ExportReport | MergeReport:
    """Write what `options` say; the disk needs room for this many `copies` of a model."""
    if (found := _packed_run(options)) is not None:
        return _write_packed(*found, copies)
    if options.step is not None:
        raise ConfigError(
            f"{options.adapter} was not trained through the quantizer: instead of --step give a folder "
            "RUN/checkpoints/step-N"
        )
    if options.to is None:
        raise ConfigError(f"{options.adapter} can become several things: write --to, and one of {', '.join(TARGETS)}")
    from quantize.export.base import Adapter

    folder = adapter_folder(options.adapter)
    adapter = Adapter(folder, *read_adapter(folder))
    out = options.folder()
    if options.to == "adapter":
        return _write_adapter(options, adapter, out)
    return _write_model(options, adapter, out, copies)


def _write_gguf(options: ExportOptions) -> ExportReport | MergeReport:
    """Convert the model in 16 bits, which is written beside the GGUF file while that is made."""
    from quantize.export.gguf import check_convertible, convert, find_converter, modelfile

    converter, packed = find_converter(options.converter), _packed_run(options)
    if packed is None:
        folder = adapter_folder(options.adapter)
        run = run_of_adapter(folder)
        exact = resolve_model(options.model or options.adapter, adapter=options.adapter if options.model else None)
        base = local_folder(exact.base)
    else:
        options, run = packed
        base = run / BASE
        folder = run / "checkpoints"
    out = options.folder()
    for source in (base, folder):
        check_target(out, source, options.overwrite, options.force)
    check_convertible(converter, base)
    with staged_folder(out) as staging:
        whole, file = staging / formats.BF16.name, f"{out.name.removesuffix(f'-{GGUF}') or out.name}.gguf"
        report = _write(replace(options, to=formats.BF16.name, out=whole, converter=None), copies=2)
        logger.info("converting to %s", file)
        convert(converter, whole, staging / file, out.name, "--model-name", out.name)
        text = modelfile(whole, file, switches_for(run, None))
        replace_text(staging / "Modelfile", text)
        shutil.rmtree(whole)
        report = replace(
            report, out=out, to=GGUF, bytes=(staging / file).stat().st_size, commands=gguf_lines(out, file)
        )
        write_json(staging / (EXPORT_REPORT if packed else MERGE_REPORT), report.to_json())
        write_card(report, run, staging / CARD)
    logger.info("wrote %s", out)
    return report


def _packed_run(options: ExportOptions) -> tuple[ExportOptions, Path] | None:
    """The run, if it trained through the quantizer and a model is to be written, and the options with its step."""
    if options.to == "adapter":
        return None
    run, step = Path(options.adapter).expanduser(), options.step
    if not (run.is_dir() and resting_kind(run) == "run" and kind_of_run(run).packs):
        adapter = adapter_folder(options.adapter)
        run = run_of_adapter(adapter)
        if run is None or not kind_of_run(run).packs:
            return None
        step = _step_of(adapter) if step is None else step
    asked = {"--model": options.model, "--prompts": options.prompts}
    asked["--onto"] = None if options.onto == "auto" else options.onto
    for option, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value}: {run} trained within the packed weights of its own 16-bit model, and nothing is "
                f"lost in packing: leave {option} out"
            )
    return replace(options, step=step, adapter=str(run)), run


def _step_of(adapter: Path) -> int | None:
    """The step of a checkpoint, or of the run's best; None for its last."""
    if (best := adapter / "validation.json").is_file():
        return read_json(best)["step"]
    named = STEP.fullmatch(adapter.resolve().name)
    return int(named[1]) if named else None


def _write_packed(options: ExportOptions, run: Path, copies: int) -> ExportReport:
    """Write the model that `run` trained through the quantizer."""
    from quantize.export.weights import check_written

    step, masters = _read(run, options)
    options = replace(options, to=options.to or masters.format.name)
    out, dense = options.folder(), not formats.get(options.to).quantized
    check_target(out, run / BASE, options.overwrite, options.force)
    check_target(out, run / "checkpoints", options.overwrite, options.force)
    check_space(out, copies * masters.output_bytes(dense))
    device = resolve_device(options.device)
    logger.info("exporting step %d of %s to %s", step, run, out)
    report = _packed_report(run, out, step, masters, options)
    layers = len(by_layer(masters.tensors))
    with staged_folder(out) as staging, progress_bar() as progress:
        track = partial(progress.track, total=layers)
        size = write_trained(masters, staging, device, partial(track, description="writing"), dense)
        lowest = check_written(masters, staging, device, partial(track, description="verifying"), dense)
        report = replace(report, bytes=size, lowest_sqnr_db=lowest)
        write_json(staging / EXPORT_REPORT, report.to_json())
        write_card(report, run, staging / CARD)
        sealed.seal(staging)
    logger.info("wrote %s", out)
    if _only_qerl(run, options):
        logger.warning("warning: %s: %s", out, ONLY_QERL)
    return report


def _read(run: Path, options: ExportOptions) -> tuple[int, Masters]:
    """(step, masters) of the checkpoint to export."""
    step, checkpoint = checkpoint_of(run, options.step)
    if damage := sealed.damage_of(run / BASE, {"config.json"}):
        raise CheckpointError(
            f"{run / BASE}, whose scales the weights are packed by, is damaged ({damage}): put its files back; a run "
            f"that has steps left makes it again, `qerl train --resume {run}`"
        )
    masters = read_trained(run, checkpoint)
    if options.to and formats.get(options.to).quantized and not masters.format.is_kind_of(formats.get(options.to)):
        raise ConfigError(
            f"--to {options.to}: {run} trains {masters.format.label} weights: write {masters.format.name}"
        )
    return step, masters


def _packed_report(run: Path, out: Path, step: int, masters: Masters, options: ExportOptions) -> ExportReport:
    made = read_json(run / BASE / REPORT)
    return ExportReport(
        out=out,
        to=options.to,
        run=str(run),
        step=step,
        begun_from=str(made.get("source")),
        quant_cfg=made.get("quant_cfg"),
        linears=sum(len(info.shape) == 2 for info in masters.trained.values()),
        trained=masters.what,
        bytes=0,
        **made_by(),
        repo=options.push_to_hub,
        commands=_commands(out, run / BASE, _only_qerl(run, options)),
    )


def _commands(out: Path, base: Path, only_qerl: bool) -> dict[str, str]:
    """What can be done with the folder `out`, which is made like `base`."""
    served = not only_qerl and served_by_vllm(base)
    return {"chat": chat_line(out), **({"vllm": serve_model_line(out)} if served else {})}


def _only_qerl(run: Path, options: ExportOptions) -> bool:
    return formats.get(options.to).quantized and only_qerl_reads(run / BASE)


def _write_adapter(options: ExportOptions, adapter: Adapter, out: Path) -> MergeReport:
    import torch

    from quantize.export.adapter import adapter_to_write, add_for_peft, find_base_name, write_adapter

    base = find_base_name(adapter, options.base_name or options.model)
    kept = adapter_to_write(options, adapter, base)
    made, origin = kept.adapter, kept.origin
    check_target(out, adapter.folder, options.overwrite, options.force)
    dtype = None if options.dtype == "keep" else getattr(torch, options.dtype)
    served_on = plain_base(kept.origin) if is_text_part(kept.origin.base) else kept.served_on
    line = serve_adapter_line(out, served_on, made.rank, bool(made.norms or made.of_experts))
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


def _adapter_notes(options: ExportOptions, adapter: Adapter, origin: TrainedOn) -> tuple[str, ...]:
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
    if drops_inputs(embedded_folder(origin.base)):
        notes.append(DROPS_INPUTS.format(origin.base, shlex.quote(options.adapter)))
    named = plain_base(origin) or origin.base
    if options.push_to_hub and Path(named).is_dir():
        notes.append(
            f"the pushed adapter names the folder {named} as its base, which others do not have: push the base too, "
            "and write `--base-name ID`"
        )
    return tuple(notes)


def _write_model(options: ExportOptions, adapter: Adapter, out: Path, copies: int) -> MergeReport:
    from quantize.export.base import check_original, choose_base, read_base
    from quantize.export.weights import check_merged, plan_merge, total, write_merged

    exact = resolve_model(options.model or options.adapter, adapter=options.adapter if options.model else None)
    to = formats.get(options.to)
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
    check_space(out, copies * plan.source.output_bytes())
    device = resolve_device(options.device)
    alone = to.quantized and trained.format.is_kind_of(to) and only_qerl_reads(trained.folder)
    if alone:
        notes = (*notes, ONLY_QERL)
    elif not trained.format.is_kind_of(to) and rounds_to_four_bits(trained.folder, trained.format):
        notes = (*notes, NO_LONGER_ROUNDED)
    if to.quantized and len(trained.format.kinds) > 1:
        notes = (*notes, REPACKED.format(trained.format.label, to.label))
    if start is not None and to.takes_start:
        notes = (*notes, NO_START.format(shlex.quote(options.adapter)))
    report = replace(
        _report(options, adapter, out, exact.base, onto.base),
        start=start and start.trained,
        notes=notes,
        commands=_commands(out, trained.folder, alone),
    )
    with staged_folder(out) as staging, progress_bar() as progress:
        size = write_merged(plan, staging, device, progress.track)
        sums = check_merged(plan, staging, device, progress.track)
        layers = tuple(part.survival() for part in sums)
        report = replace(report, bytes=size, survival=total(sums), layers=layers)
        _write_texts(report, adapter, staging)
    return _with_effect(options, exact, adapter, report)


def _start_on(exact: ModelRef, adapter: Adapter) -> AdapterStart | None:
    """The start of an adapter that is merged with the base `exact`; None if there is none, or none acts on that base.

    Raises CheckpointError for a base that is not the start's.
    """
    from quantize.export.adapter import HOLDS_START, start_in_merge

    trained = start_of_adapter(adapter.folder)
    if trained is None or (trained.kind == "frozen" and not formats.get(exact.format).quantized):
        return None
    if not formats.get(exact.format).quantized:
        raise CheckpointError(HOLDS_START.format(adapter.folder, exact.base))
    start = start_in_merge(adapter.folder, exact.base)
    check_start(start.found, exact.base)
    return start


def _with_effect(options: ExportOptions, exact: ModelRef, adapter: Adapter, report: MergeReport) -> MergeReport:
    """Measure the effect on prompts and complete report and card. If it cannot be measured here, nothing is lost."""
    if not options.prompt_count:
        return report
    from quantize.export.effect import measure_effect

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


def _report(options: ExportOptions, adapter: Adapter, out: Path, base: str, onto: str) -> MergeReport:
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
        **made_by(),
        repo=options.push_to_hub,
    )


def _write_texts(report: MergeReport, adapter: Adapter, folder: Path) -> None:
    """Write merge_report.json and the model card, each whole or not at all."""
    replace_text(folder / MERGE_REPORT, json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    write_card(report, run_of_adapter(adapter.folder), folder / CARD)
    list_files(folder, (MERGE_REPORT, CARD))
