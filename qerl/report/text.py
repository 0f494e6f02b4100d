"""The report in words and tables: report.md, which is also shown on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from qerl.base.printable import printable
from qerl.report.evaluations import Pair, pairs
from qerl.report.read import Evaluation, Row, Run
from qerl.report.sampling import sampling_text
from qerl.report.stages import held_note, stage_table, stages
from qerl.report.summary import changes, fifth, rounded
from qerl.report.validations import validation_table
from qerl.report.verdict import Judged, verdict
from qerl.report.warnings import latest_warnings


def render_text(run: Run, compared: tuple[Evaluation, Evaluation] | None = None, judged: Judged | None = None) -> str:
    """The report in Markdown; `compared` and `judged` are those of `page.render_page`."""
    first = f"**{verdict(run, compared, judged)}**"
    sections = [f"# {run.name}", first, *_warnings(run), _training(run.rows), *_validations(run), *_stages(run.rows)]
    if compared:
        sections += [
            _comparison(*compared),
            *([judged.text] if judged else []),
            *(_pair(pair) for pair in pairs(*compared)),
        ]
    return printable("\n\n".join(sections)) + "\n"


def _warnings(run: Run) -> list[str]:
    lines = [f"- step {steps}: {text}" for steps, text in latest_warnings(run)]
    return ["Warnings while it ran:\n\n" + "\n".join(lines)] if lines else []


def _training(rows: Sequence[Row]) -> str:
    lines = ["| training | first steps | last steps |", "|---|---|---|"]
    lines += [f"| {change.label} | {rounded(change.first)} | {rounded(change.last)} |" for change in changes(rows)]
    note = f"{len(rows)} steps; each column is the mean of {fifth(rows)}. Curves: curves.png"
    sampling = sampling_text(rows)
    return "\n".join(lines) + f"\n\n{note}" + (f"\n\nDynamic sampling: {sampling}." if sampling else "")


def _validations(run: Run) -> list[str]:
    found = validation_table(run)
    if found is None:
        return []
    heading, cells = found
    table = [heading, ["---"] * len(heading), *cells]
    return ["Validation:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in table)]


def _stages(rows: Sequence[Row]) -> list[str]:
    """A table of the noise stages; nothing for a run without noise."""
    found = stages(rows)
    if not any(stage.sigma_high for stage in found):
        return []
    heading, cells = stage_table(found)
    table = [heading, ["---"] * len(heading), *cells]
    note = "Means by noise stage. entropy is the trained policy's, sampling entropy that of the policy that sampled. "
    return ["\n".join(f"| {' | '.join(line)} |" for line in table) + f"\n\n{note}{held_note(rows)}".rstrip()]


def _comparison(before: Evaluation, after: Evaluation) -> str:
    results = [before.result, after.result]
    lines = [f"| {results[0]['task']} | before | after |", "|---|---|---|"]
    accuracies = [result["accuracy"] for result in results]
    lines.append("| **accuracy** | " + " | ".join(f"**{value['value']:.1%}**" for value in accuracies) + " |")
    intervals = [f"{value['low']:.1%} to {value['high']:.1%}" for value in accuracies]
    lines.append(f"| 95% interval | {intervals[0]} | {intervals[1]} |")
    for label, key in (("truncated", "truncated_share"), ("no answer", "no_answer_share")):
        lines.append(f"| {label} | {results[0][key]:.1%} | {results[1][key]:.1%} |")
    return "\n".join(lines)


def _pair(pair: Pair) -> str:
    marks = ["right" if row["correct"] else "wrong" for row in pair]
    return (
        f"**{pair.before['question'].strip()}** (answer {pair.before['answer']})\n\n"
        f"- before ({marks[0]}): `{_one_line(pair.before['completion'])}`\n"
        f"- after ({marks[1]}): `{_one_line(pair.after['completion'])}`"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")[:300]
