"""The result of an export: a report beside the weights, warnings in words, and a table for the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from qerl import formats
from qerl.checkpoint.base_start import TrainedStart
from quantize.export.options import GGUF
from quantize.report import format_size, table_of

if TYPE_CHECKING:
    from quantize.export.effect import Effect
    from quantize.export.weights import Survival


MOST = 0.5  # if less than this share is kept, most of the adapter is lost


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What was written: a report beside the weights, a table for the terminal, and rows for the model card."""

    out: Path
    to: str
    bytes: int
    created: str
    versions: dict[str, str]
    commands: dict[str, str] = field(default_factory=dict)
    repo: str | None = None  # where it is pushed to

    @property
    def shown(self) -> str:
        """By what others load it: the hub's id of what is pushed, or the folder."""
        return self.repo or str(self.out)

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return {"adapter": "PEFT adapter", GGUF: "GGUF file in BF16"}.get(self.to) or formats.get(self.to).model_label

    @property
    def tags(self) -> tuple[str, ...]:
        of_format = {"adapter": (), GGUF: (GGUF,)}.get(self.to)
        return self.made, *(formats.get(self.to).card_tags if of_format is None else of_format)

    def warnings(self) -> list[str]:
        """What a user has to know before using the result, one sentence each."""
        return []

    def measured(self) -> dict[str, str]:
        """The measurements, by the names that people read."""
        return {}

    def table(self) -> Table:
        """What the result is, and what was measured, for the terminal."""
        written = {"written to": f"{self.out} ({format_size(self.bytes)})"}
        return table_of(self.kind, {**self.rows(), **written, **self.measured()})

    def to_json(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "out"}


@dataclass(frozen=True, kw_only=True)
class ExportReport(_Written):
    """A model that was trained through the quantizer: `export_report.json`."""

    run: str
    step: int
    begun_from: str  # the 16-bit model
    quant_cfg: str | None  # digest of the run's, for a packed model
    linears: int  # trained
    trained: str  # masters, or 16-bit weights with the adapter
    lowest_sqnr_db: float | None = None  # of the written linears to their masters; None if all are exact

    made, evaluated = "qat", "the finished run"

    @property
    def base(self) -> str:
        """As in a `MergeReport`."""
        return self.begun_from

    def rows(self, origin: str | None = None) -> dict[str, str]:
        """What the result is, by the names that people read; for a card, with the base as `origin`, without paths."""
        run = f"`{Path(self.run).name}`" if origin else self.run
        how = f"the {self.trained} rounded to bfloat16, which is not the model that was sampled from"
        if self.to != GGUF and formats.get(self.to).quantized:
            how = "packed as the engine holds them"
        rows = {
            "run": f"{run}, step {self.step}",
            "begun from": origin or self.begun_from,
            "weights": f"{self.linears} trained linears, {how}",
        }
        if self.lowest_sqnr_db is not None:
            rows["SQNR"] = f"lowest {self.lowest_sqnr_db:.1f} dB, against the {self.trained}"
        return rows


@dataclass(frozen=True, kw_only=True)
class MergeReport(_Written):
    """An adapter, or a model that one was merged into: `merge_report.json`.

    `survival` covers all linears, `layers` each one; both are empty for an adapter folder. `start` is that of the
    adapter's training; for an adapter folder that of what was written.
    """

    adapter: str
    base: str  # the model that the adapter was trained on
    onto: str  # the model that it was merged onto; for an adapter folder the base that it is for
    rank: int
    scaling: float
    trained_norms: int
    start: TrainedStart | None = None
    notes: tuple[str, ...] = ()
    survival: Survival | None = None
    layers: tuple[Survival, ...] = ()
    effect: Effect | None = None

    made, evaluated = "lora", "base + adapter"

    def warnings(self) -> list[str]:
        """What a user has to know before using the result, one sentence each."""
        effect, kept = self.effect, self.survival and self.survival.kept
        lost = None
        if effect is not None and effect.kept is not None and effect.kept < MOST:
            lost = (
                f"only {max(0.0, effect.kept):.0%} of the adapter's effect is left in the merged model (KL to the "
                f"exact policy {effect.kl_merged:.2g} nats per token, of the base alone {effect.kl_base:.2g})"
            )
        elif kept is not None and kept < MOST:
            lost = f"rounding kept only {max(0.0, kept):.0%} of the adapter's change of the weights"
        remedy = f"serve the adapter on its base, or merge to {formats.BF16.name}"
        return [*self.notes, *([f"{lost}: {remedy}"] if lost else [])]

    def to_json(self) -> dict:
        return {**super().to_json(), "warnings": self.warnings()}

    def rows(self, origin: str | None = None) -> dict[str, str]:
        """What the result is, by the names that people read; for a card, with the base as `origin`, without paths."""
        rows = {"trained on": origin} if origin else {}
        rows["adapter"] = f"{'LoRA' if origin else self.adapter}, rank {self.rank}, alpha / rank {self.scaling:g}"
        if self.start is not None:
            how = "acts beside the adapter" if self.start.kind == "frozen" else "the adapter began at it and holds it"
            rows["start"] = f"rank {self.start.rank}, {how}"
        if not origin or self.onto != self.base:
            rows["base" if self.to == "adapter" else "merged onto"] = f"`{self.onto}`" if origin else self.onto
        return rows | ({"trained norms": str(self.trained_norms)} if self.trained_norms else {})

    def measured(self) -> dict[str, str]:
        """The measurements, by the names that people read."""
        found = {}
        if self.survival is not None and self.survival.kept is not None:
            part = self.survival
            found["weight change kept"] = (
                f"{part.kept:.1%} along s B A, cosine {part.cosine:.3f}, norm ratio {part.norm_ratio:.2f}"
            )
            worst = min((layer for layer in self.layers if layer.kept is not None), key=lambda layer: layer.kept)
            found["least kept"] = f"{worst.kept:.1%} ({worst.name})"
        if self.effect is not None:
            effect = self.effect
            share = "" if effect.kept is None else f"{effect.kept:.1%}: "
            found["effect kept"] = (
                f"{share}KL to base + adapter {effect.kl_merged:.2e} nats per token, of the base alone "
                f"{effect.kl_base:.2e} ({effect.tokens} tokens, {effect.prompts} prompts of {effect.prompts_from})"
            )
            found["same greedy completion"] = f"{effect.same_greedy} of {effect.prompts}"
        return found
