"""report.html: a single file that a browser shows without contacting any server.

Whatever a run wrote, above all its completions, is shown as plain text: the template escapes every value, and the
page's content security policy forbids all scripts and requests.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qerl.base.printable import printable
from qerl.report.completions import extremes, shorten
from qerl.report.curves import constant_table
from qerl.report.evaluations import evaluation_table, mistakes, pairs
from qerl.report.figures import curve_pictures, evaluation_picture, time_picture
from qerl.report.read import Evaluation, Run
from qerl.report.sampling import sampling_text
from qerl.report.stages import held_note, stage_table, stages
from qerl.report.summary import change_table, differences, fifth, memory_table, phase_table
from qerl.report.validations import validation_table
from qerl.report.verdict import Judged, verdict
from qerl.report.warnings import latest_warnings


def render_page(
    runs: Sequence[Run], compared: tuple[Evaluation, Evaluation] | None = None, judged: Judged | None = None
) -> str:
    """The page of one run, or of several side by side.

    `compared` are the evaluations before and after training; `judged` says whether their difference is significant.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qerl.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template("page.html.j2").render(
        title=f"{'Runs' if len(runs) > 1 else 'Run'} {' and '.join(run.name for run in runs)}",
        runs=[_run(run, compared if len(runs) == 1 else None, judged) for run in runs],
        changes=change_table(runs),
        fifths=sorted({fifth(run.rows) for run in runs}),
        pictures=curve_pictures(runs),
        constants=constant_table(runs),
        time=time_picture(runs),
        phases=phase_table(runs),
        memory=memory_table(runs),
        evaluations=_evaluations(_all_evaluations(runs, compared)),
        pairs=pairs(*compared) if compared else [],
        judged=judged.text if judged else None,
        differences=differences(runs) if len(runs) > 1 else [],
        shorten=shorten,
    )


def _all_evaluations(runs: Sequence[Run], compared: tuple[Evaluation, Evaluation] | None) -> list[Evaluation]:
    """The evaluations before and after, if given, then those in the directories of the runs.

    With several runs, the name of an evaluation begins with that of its run.
    """
    found = [
        replace(evaluation, name=f"{run.name}: {evaluation.name}") if len(runs) > 1 else evaluation
        for run in runs
        for evaluation in run.evaluations
    ]
    first = [evaluation.folder.resolve() for evaluation in compared or ()]
    named = [next((f for f in found if f.folder.resolve() == e.folder.resolve()), e) for e in compared or ()]
    return named + [evaluation for evaluation in found if evaluation.folder.resolve() not in first]


def _run(run: Run, compared: tuple[Evaluation, Evaluation] | None, judged: Judged | None) -> dict[str, Any]:
    found = stages(run.rows)
    return {
        "name": run.name,
        "verdict": verdict(run, compared, judged),
        "facts": _facts(run),
        "stages": stage_table(found) if any(stage.sigma_high for stage in found) else None,
        "held": held_note(run.rows),
        "validations": validation_table(run),
        "warnings": latest_warnings(run),
        "samples": extremes(run),
        "config": run.config_text,
        "versions": run.about.get("versions") or {},
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    """The facts that a reader wants to know first, as far as the run recorded them."""
    config, last = run.config, run.rows[-1]
    planned = (config.get("run") or {}).get("steps")
    seconds = sum(row.get("time/step_s") or 0.0 for row in run.rows)
    totals = run.about.get("totals") or []
    changes = ", ".join(f"up to step {each['after']} with the schedules of {each['was']} steps" for each in totals)
    note = f" ({changes})" if changes else ""
    facts = [
        ("steps", f"{last['step']} of {planned}{note}" if planned else str(last["step"])),
        ("base", run.about.get("base") or (config.get("model") or {}).get("base")),
        ("task", (config.get("data") or {}).get("task")),
        ("recipe", run.about.get("recipe")),
        ("time in steps", _duration(seconds) if seconds else None),
        ("tokens", f"{last['tokens_total']:,.0f}" if last.get("tokens_total") else None),
        ("dynamic sampling", sampling_text(run.rows)),
        ("command", _command(run.about.get("command") or [])),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _evaluations(evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    if not evaluations:
        return None
    heading, cells = evaluation_table(evaluations)
    wrong = [(evaluation.name, mistakes(evaluation)) for evaluation in evaluations]
    return {
        "heading": heading,
        "cells": cells,
        "picture": evaluation_picture(evaluations),
        "mistakes": [(name, rows) for name, rows in wrong if rows],
    }


def _command(arguments: Sequence[str]) -> str:
    """The command as it was typed; the first argument is the path of the script."""
    return shlex.join(["qerl", *arguments[1:]]) if arguments else ""


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _printable(value: Any) -> Any:
    return printable(value) if type(value) is str else value
