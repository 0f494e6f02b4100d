"""`qerl report`: read the runs, and write the page, the text and the curves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.markdown import Markdown

from qerl.base.errors import ConfigError
from qerl.base.printable import SafeConsole
from qerl.report.curves import draw_curves
from qerl.report.page import render_page
from qerl.report.read import read_evaluation, read_runs
from qerl.report.shapes import ComparedResult
from qerl.report.text import render_text
from qerl.report.verdict import Judged

logger = logging.getLogger(__name__)


def write_report(
    folders: Sequence[Path],
    before: Path | None = None,
    after: Path | None = None,
    out: Path | None = None,
    judged: Judged | None = None,
) -> Path:
    """Write the page, and for a single run also curves.png and report.md; print the report and return the page's path.

    `judged` says whether `before` and `after` differ significantly. The page is written to `out`, by default
    report.html in the run's folder, or comparison.html in that of the first of several runs. Raises DataError for a run
    without metrics, ConfigError for options that do not go together.
    """
    if (before is None) != (after is None):
        raise ConfigError("a comparison needs both: write `--before FOLDER --after FOLDER`, or neither")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder: give the file to write, such as {out / 'report.html'}")
    runs = read_runs(folders)
    read = partial(read_evaluation, shape=ComparedResult)
    compared = (read(before), read(after)) if before and after else None
    page = out or runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_page(runs, compared, judged), encoding="utf-8")
    for run in runs:
        text = render_text(run, compared, judged)
        SafeConsole().print(Markdown(text))
        if len(runs) == 1:
            (run.folder / "report.md").write_text(text, encoding="utf-8")
            draw_curves(run, run.folder / "curves.png")
            logger.info("report: %s, curves: %s", run.folder / "report.md", run.folder / "curves.png")
    logger.info("page: %s", page)
    return page
