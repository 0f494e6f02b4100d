"""The README.md of an exported model: a model card in the hub's format, from the run and what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from quantize.merge.card import (
    base_on_hub,
    evaluation_text,
    licence_of,
    loading_lines,
    read_results,
    table_text,
    training_text,
)

if TYPE_CHECKING:
    from quantize.export.run import ExportReport


def card_text(report: ExportReport, run: Path) -> str:
    """The model card: metadata and text."""
    from huggingface_hub import ModelCardData

    licence = licence_of(report.begun_from)
    data = ModelCardData(
        base_model=base_on_hub(report.begun_from),
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["qerl", "grpo", "qat", *formats.get(report.to).card_tags],
    )
    rows = {
        "what": formats.get(report.to).model_label,
        **report.rows(),
        "run": f"`{Path(report.run).name}`, step {report.step}",
        "begun from": f"`{base_on_hub(report.begun_from) or Path(report.begun_from).name}`",
        "licence": f"{licence} (the base's)" if licence else "that of the base model, which its folder does not state",
        "made": f"{report.created} by `qerl export --to {report.to}`",
    }
    results = read_results(run)
    parts = [f"# {report.out.name}\n\n{table_text(rows)}", loading_lines(report.out, report.commands.values())]
    parts.append(training_text(run))
    if results:
        parts.append(evaluation_text(results, "the finished run"))
    parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f"---\n{data.to_yaml().strip()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"
