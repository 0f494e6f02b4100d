"""What a measured run has so far, in the file that its report will replace, in case that the run is cut off."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

EVERY_S = 2.0


class SoFar:
    """While the block runs, `out` gets `head` and the complete lines of `metrics` as `steps`, with `unfinished`."""

    def __init__(self, head: dict[str, Any], metrics: Path, out: Path | None) -> None:
        self._head, self._metrics, self._out = head, metrics, out
        self._done, self._steps = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> SoFar:
        if self._out is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self.write()

    def write(self) -> None:
        """Write the file anew if there are further steps."""
        if self._out is None or not self._metrics.exists():
            return
        lines = self._metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        if len(lines) > self._steps:
            self._steps = len(lines)
            report = {**self._head, "unfinished": True, "steps": [json.loads(line) for line in lines]}
            self._out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            self.write()
