"""`qerl.quantize`, `qerl.merge` and `qerl.export`: from a model's folder to another one."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qerl.api.arguments import check_keywords, model_name

if TYPE_CHECKING:
    from qerl.api.run import Run
    from quantize.export.run import ExportReport
    from quantize.merge.report import MergeReport
    from quantize.report import QuantizeReport

Options = TypeVar("Options")


def quantize(
    model: str | os.PathLike, out: str | os.PathLike | None = None, *, gpu: int | None = None, **options: Any
) -> QuantizeReport:
    """Turn a 16-bit checkpoint into NVFP4, and verify it; the report's `out` is the folder.

    `options` are those of `qerl quantize`, such as method, calibration and overwrite.
    """
    from qerl.api.process import as_before
    from quantize.command import quantized
    from quantize.options import QuantizeOptions

    chosen = _options(QuantizeOptions, options, "qerl.quantize")
    with as_before():
        return quantized(model_name(model), None if out is None else Path(out), gpu, chosen)


def merge(adapter: str | os.PathLike | Run, to: str, *, gpu: int | None = None, **options: Any) -> MergeReport:
    """Turn a run's adapter into a folder to serve or publish; the report's `out` is the folder.

    `to` is adapter, bf16 or nvfp4; `options` are those of `qerl merge`.
    """
    from qerl.api.process import as_before
    from quantize.merge.command import merged
    from quantize.merge.options import MergeOptions

    chosen = _options(MergeOptions, {**options, "adapter": model_name(adapter), "to": to}, "qerl.merge")
    with as_before():
        return merged(chosen, gpu)


def export(run: str | os.PathLike | Run, **options: Any) -> ExportReport:
    """Turn a run that trained whole weights into a folder to serve or publish; the report's `out` is the folder.

    `options` are those of `qerl export`: to, out, step, overwrite, force and device.
    """
    from qerl.api.process import as_before
    from quantize.export.command import exported
    from quantize.export.options import ExportOptions

    chosen = _options(ExportOptions, {**options, "run": Path(model_name(run))}, "qerl.export")
    with as_before():
        return exported(chosen)


def _options(kind: type[Options], given: dict[str, Any], function: str) -> Options:
    """The options of a command. Raises ConfigError for one that it does not have."""
    check_keywords(given, [each.name for each in fields(kind)], function)
    typed = {name: Path(value) if name in ("out", "prompts") and value else value for name, value in given.items()}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()})
