"""What a notebook shows during a run: one cell output that is drawn again, with the progress and the reward's curve."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any

from training.run_dir.progress import MACHINE_NUMBERS, NUMBERS, REFRESH_PER_S, numbers, time_left, validation_text

WIDTH, HEIGHT = 480, 90  # of the curve, in pixels


class NotebookDisplay:
    """Takes what `training.run_dir.progress.Display` takes. Needs IPython, which every notebook has."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._phase, self._text, self._left, self._validation = "starting", "", "", ""
        self._rewards: list[float] = []
        self._handle: Any = None
        self._drawn_at = float("-inf")

    def start(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.page()), display_id=True)

    def stop(self) -> None:
        """Draw the last state, which stays in the notebook."""
        self._phase, self._left = "ended", ""
        self._draw(at_once=True)

    def phase(self, name: str) -> None:
        """Show what the run is doing from now on."""
        self._phase = name
        self._draw()

    def step(self, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Show the last of `rows`, the metrics of the steps so far, and the progress towards `steps`."""
        self._done, self._left = rows[-1]["step"], time_left(rows, steps)
        self._text = numbers(rows[-1], NUMBERS | MACHINE_NUMBERS)
        self._rewards = [row["reward"] for row in rows if row.get("reward") is not None]
        self._draw(at_once=self._done == steps)

    def validated(self, row: Mapping[str, Any]) -> None:
        """Show this validation from now on."""
        self._validation = f"validation {validation_text(row)} at step {row['step']}"
        self._draw(at_once=True)

    def page(self) -> str:
        """The output as HTML."""
        about = " · ".join(filter(None, (f"step {self._done}/{self._steps}", self._phase, self._left)))
        lines = [about, self._text, self._validation]
        bar = f'<progress value="{self._done}" max="{self._steps}" style="width:{WIDTH}px"></progress>'
        return "<br>".join([bar, *(html.escape(line) for line in lines if line)]) + curve(self._rewards)

    def _draw(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._handle is None or (not at_once and now - self._drawn_at < 1 / REFRESH_PER_S):
            return
        from IPython.display import HTML

        self._drawn_at = now
        self._handle.update(HTML(self.page()))


def curve(rewards: Sequence[float]) -> str:
    """The rewards of the steps so far as a small drawing, an SVG; nothing before the second step."""
    if len(rewards) < 2:
        return ""
    low, high = min(rewards), max(rewards)
    span = high - low or 1.0
    points = " ".join(
        f"{WIDTH * index / (len(rewards) - 1):.1f},{HEIGHT * (1 - (reward - low) / span):.1f}"
        for index, reward in enumerate(rewards)
    )
    label = f"reward, from {low:.3g} to {high:.3g}"
    return (
        f'<br><svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 -3 {WIDTH} {HEIGHT + 6}" role="img">'
        f'<title>{label}</title><polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/></svg>'
        f"<br><small>{label}</small>"
    )
