"""The result of a quantization: `quantize_report.json` beside the weights, and a short table for the terminal."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from qerl.base.versions import versions
from qerl.checkpoint.experts import all_experts
from qerl.checkpoint.verify import LayerCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quantize.output_error import ModelError, OutputErrors


@dataclass(frozen=True)
class QuantizeReport:
    """The result of `quantize_checkpoint`. `layers` has one entry per quantized linear, in the model's order."""

    out: Path
    source: str  # hub id, `tiny`, or absolute folder
    method: str
    global_scale: str | None  # amax or pow2; None: the format has none
    scheme: str
    activations: str  # none, dynamic or static scales
    layout: str  # `quantization_config.format`
    ignore: tuple[str, ...]  # patterns as given
    kept_linears: tuple[str, ...]  # kept in 16 bits by these patterns, apart from lm_head, which always is
    sqnr_reference: str  # what the weights are compared with
    layers: list[LayerCheck]
    scales: str | None  # of blocks: pow2 or fp32; None: the format has one kind
    created: str  # ISO 8601, UTC
    versions: dict[str, str]
    bytes_before: int  # of all tensors
    bytes_after: int = 0
    text_part: bool = False  # of a model for pictures and text, the source
    calibration: dict | None = None
    outputs: OutputErrors | None = None  # None if there were no rows
    start: dict | None = None  # rank, and rate_ratio: see `quantize.rounding.rate_ratio`
    copied_files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def _rated(self) -> list[LayerCheck]:
        """The linears that are neither exact nor zero."""
        return [layer for layer in self.layers if layer.sqnr_db is not None and math.isfinite(layer.sqnr_db)]

    def mean_sqnr_db(self) -> float | None:
        """The mean SQNR of the linears, in dB."""
        values = [layer.sqnr_db for layer in self._rated()]
        return sum(values) / len(values) if values else None

    def worst(self) -> LayerCheck | None:
        """The linear with the lowest SQNR."""
        return min(self._rated(), key=lambda layer: layer.sqnr_db, default=None)

    def to_json(self) -> dict:
        worst = self.worst()
        values = asdict(self)
        del values["out"]
        outputs = values.pop("outputs")
        linears, rounded = (outputs.pop(key) if outputs else {} for key in ("linears", "rounded_linears"))
        layout = values.pop("layout")
        layers = [{**layer, "sqnr_db": _rounded(layer["sqnr_db"])} for layer in values.pop("layers")]
        for layer in layers if outputs else ():
            layer["output_error"] = _rounded(linears[layer["name"]])
            layer["output_error_by_rounding"] = _rounded(rounded.get(layer["name"]))
        layers = _by_layer(layers)
        return {
            "format": layout,
            **values,
            "sqnr_db": {
                "mean": _rounded(self.mean_sqnr_db()),
                "min": _rounded(worst.sqnr_db if worst else None),
                "worst": worst.name if worst else None,
            },
            "outputs": outputs,
            "layers": layers,
        }

    def table(self) -> Table:
        """A short table: where the model is, how large, and how good."""
        worst, mean, ratio = self.worst(), self.mean_sqnr_db(), self.bytes_after / self.bytes_before
        rows = {
            "model": self.source,
            "written to": str(self.out),
            "tensors": f"{format_size(self.bytes_before)} -> {format_size(self.bytes_after)} ({ratio:.0%})",
            "linears": f"{len(self.layers)} quantized, {len(self.kept_linears)} kept by --ignore",
        }
        if self.global_scale == "pow2":
            rows["global scales"] = "powers of two"
        if self.scales is not None:
            rows["scales of blocks"] = "powers of two" if self.scales == "pow2" else "float32"
        if self.activations != "none":
            rows["activations"] = f"rounded as well, by {self.activations} scales"
        if self.calibration and self.calibration["sequences"]:
            sequences, length = self.calibration["sequences"], self.calibration["sequence_length"]
            rows["calibration"] = f"{sequences} x {length} tokens of {self.calibration['data']}"
        if worst and mean is not None:
            rows["SQNR"] = f"mean {mean:.1f} dB, lowest {worst.sqnr_db:.1f} dB ({worst.name})"
        if self.start:
            rows["start"] = start_row(self.start)
        rows |= {**(output_rows(self.outputs) if self.outputs else {}), "time": f"{self.seconds:.1f} s"}
        return table_of(f"{self.scheme} by {self.method}", rows)


def table_of(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def made_by() -> dict[str, Any]:
    """The fields `created` and `versions` of a report."""
    return {"created": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}


def _by_layer(entries: list[dict]) -> list[dict]:
    """The same with one entry for all experts of a layer in place of one for each, of which there can be thousands.

    Its numbers are their means, but `global_scale` is the smallest and the largest, and an error the worst one's.
    """
    found: dict[str, dict] = {}
    experts: dict[str, list[dict]] = {}
    for entry in entries:
        name = all_experts(entry["name"])
        found.setdefault(name, entry)
        if name != entry["name"]:
            experts.setdefault(name, []).append(entry)
    for name, own in experts.items():
        rated = [entry for entry in own if entry["sqnr_db"] is not None]
        worst = min(rated, key=lambda entry: entry["sqnr_db"], default=None)
        found[name] = {
            **{key: max(entry[key] or 0.0 for entry in own) for key in own[0] if key.startswith("output_error")},
            "name": name,
            "experts": len(own),
            "shape": own[0]["shape"],
            "global_scale": [bound(entry["global_scale"] for entry in own) for bound in (min, max)],
            "sqnr_db": _rounded(sum(entry["sqnr_db"] for entry in rated) / len(rated)) if rated else None,
            "lowest_sqnr_db": worst and worst["sqnr_db"],
            "lowest": worst and worst["name"],
        }
    return list(found.values())


def start_row(start: dict) -> str:
    ratio = start["rate_ratio"]
    return f"of rank {start['rank']}" + (f"; a trained start moves {ratio:.1f} times as far per step" if ratio else "")


def output_rows(outputs: OutputErrors) -> dict[str, str]:
    """Rows of the table: the errors of the outputs, and in brackets those with the start and by rounding to nearest."""
    others = {"with the start": outputs.started, "by rounding to nearest": outputs.rounded}

    def beside(text: str, number: Callable[[ModelError], str]) -> str:
        listed = ", ".join(f"{number(model)} {name}" for name, model in others.items() if model)
        return text.format(number(outputs.written)) + (f" ({listed})" if listed else "")

    worst = max(outputs.linears, key=outputs.linears.get)
    return {
        "outputs": f"of {outputs.rows()}, beside the 16-bit model's:",
        "  linears": f"wrong by at most {outputs.linears[worst]:.1%} ({worst})",
        "  logits": beside("wrong by {}", lambda model: f"{model.logit_error:.1%}"),
        "  KL": beside("{} nats per token", lambda model: f"{model.kl:.2g}"),
        "  top token": beside("the same at {}", lambda model: f"{model.same_top_token:.1%}"),
    }


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def format_size(nbytes: int) -> str:
    """A number of bytes in GiB, MiB, KiB or B, for people."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"
