"""The report's page and text, and the files that `qerl report` writes.

report.html is a single file that a browser shows without contacting any server. Whatever a run wrote, above all its
completions, is shown as plain text: the template escapes every value, and the page's content security policy forbids
all scripts and requests. report.md has the report in words and tables; the terminal shows it too.
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from qerl.base.errors import ConfigError
from qerl.base.files import refusal_of
from qerl.base.printable import SafeConsole, printable
from qerl.config.objectives import RunKind
from qerl.report.curves import DRAWN, constant_table, curves, pictures
from qerl.report.read import (
    ComparedResult,
    Evaluation,
    Row,
    Run,
    latest_warnings,
    read_evaluation,
    read_runs,
    sampling_text,
)
from qerl.report.sections import (
    Judged,
    Pair,
    Table,
    change_table,
    differences,
    evaluation_cells,
    evaluation_table,
    fifth,
    held_out,
    memory_table,
    mistakes,
    pairs,
    phase_table,
    stage_table,
    validation_table,
    verdict,
)

SHOWN = 3
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"  # in the head of each page
LONGEST = 6000  # characters of a completion that the page shows


@dataclass(frozen=True)
class Sample:
    """One completion. `reward` is the weighted sum that it was trained on."""

    step: int
    reward: float
    rewards: dict[str, Any]
    prompt: str
    completion: str
    turns: Sequence[Mapping[str, Any]] = ()  # of an episode: role, text and tokens
    ended: str = ""


@dataclass(frozen=True)
class Extremes:
    """The best and the worst samples from the later half of the sampled steps; without rewards the last ones as best.

    `count` is the number of all samples.
    """

    count: int
    from_step: int
    best: list[Sample]
    worst: list[Sample]
    rewarded: bool = True


def extremes(run: Run) -> Extremes | None:
    """The extremes of a run; None if it logged no completions.

    A text that occurs several times counts once, and of samples with equal rewards the later one is shown.
    """
    found = [_sample(row, _weights(run, row.get("source"))) for row in run.samples]
    if not found:
        return None
    steps = sorted({sample.step for sample in found})
    from_step = steps[len(steps) // 2]
    late = {(sample.prompt, sample.completion): sample for sample in found if sample.step >= from_step}
    ranked = sorted(late.values(), key=lambda sample: (-sample.reward, -sample.step))
    if not any(sample.rewards for sample in found):
        return Extremes(len(found), from_step, ranked[:SHOWN], [], rewarded=False)
    count = min(SHOWN, (len(ranked) + 1) // 2)
    worst = sorted(ranked[count:], key=lambda sample: (sample.reward, -sample.step))
    return Extremes(len(found), from_step, ranked[:count], worst[:SHOWN])


def shorten(text: str) -> str:
    """The text in about LONGEST characters, with a note on how many were left out of the middle."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _weights(run: Run, source: object = None) -> dict[str, float]:
    """The weight of each reward of a source by its name in the log.

    That is the name of the function alone, or the full dotted path if an earlier reward has the same function name.
    """
    sources = (run.config.get("data") or {}).get("sources") or []
    own = next((each.get("rewards") for each in sources if each.get("name") == source), None)
    rewards: Sequence[dict[str, Any]] = own or run.config.get("rewards") or []
    whole = {reward["name"]: reward.get("weight", 1.0) for reward in rewards}
    short = {name.replace(":", ".").rpartition(".")[2]: weight for name, weight in reversed(whole.items())}
    return short | whole


def _sample(row: Row, weights: dict[str, float]) -> Sample:
    rewards = row.get("rewards") or {}
    total = sum(value * weights.get(name, 1.0) for name, value in rewards.items() if value is not None)
    texts = _text(row["prompt"]), _text(row["completion"])
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        turns = []  # the line is damaged, or the completion has one turn
    shown = [{"tokens": 0, **turn, "role": str(turn.get("role")), "text": str(turn.get("text", ""))} for turn in turns]
    return Sample(row["step"], total, rewards, *texts, shown, str(row.get("ended", "")))


def _text(value: Any) -> str:
    """The text itself, or the contents of a conversation's messages."""
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", message)) for message in value)


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
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    first, later = pictures(runs)
    shown = [_run(run, compared if len(runs) == 1 else None, judged) for run in runs]
    return environment.get_template("page.html.j2").render(
        completions=any(each["writes"] or each["samples"] for each in shown) or bool(compared),
        title=_title(runs),
        runs=shown,
        changes=change_table(runs),
        fifths=sorted({fifth(run.rows) for run in runs}),
        curves=first,
        more_curves=later,
        colours=DRAWN,
        constants=constant_table(runs),
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

    With several runs, an evaluation has its run's name, and its own besides where a run has several.
    """
    found = [
        replace(evaluation, name=": ".join([run.name] + [evaluation.name] * (len(run.evaluations) > 1)))
        if len(runs) > 1
        else evaluation
        for run in runs
        for evaluation in run.evaluations
    ]
    first = [evaluation.folder.resolve() for evaluation in compared or ()]
    named = [next((f for f in found if f.folder.resolve() == e.folder.resolve()), e) for e in compared or ()]
    return named + [evaluation for evaluation in found if evaluation.folder.resolve() not in first]


def _run(run: Run, compared: tuple[Evaluation, Evaluation] | None, judged: Judged | None) -> dict[str, Any]:
    return {
        "name": run.name,
        "verdict": verdict(run, compared, judged),
        "held_out": held_out(run, compared),
        "facts": _facts(run),
        "stages": stage_table(run.rows),
        "validations": validation_table(run),
        "warnings": latest_warnings(run),
        "samples": extremes(run),
        "writes": RunKind.of(run.config).samples,
        "config": run.config_text,
        "versions": run.about.get("versions") or {},
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    """The facts that a reader wants to know first, as far as the run recorded them."""
    config, last, command = run.config, run.rows[-1], run.about.get("command")
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
        ("begun by", command and _begun_by(command)),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _begun_by(command: Sequence[str]) -> str:
    """`qerl ...`, the script of a program in Python with its arguments, or a notebook."""
    script, *arguments = command
    if script.endswith("kernel_launcher.py"):
        return "a notebook"
    if script in ("", "-c", "-"):
        return "Python, without a script"
    own = Path(script).name == "qerl" or Path(script).parts[-3:-1] == ("qerl", "cli")
    return shlex.join(["qerl", *arguments] if own else ["python", script, *arguments])


def _evaluations(evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    if not evaluations:
        return None
    wrong = [(evaluation.name, mistakes(evaluation)) for evaluation in evaluations]
    return {"table": evaluation_table(evaluations), "mistakes": [(name, rows) for name, rows in wrong if rows]}


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def render_text(run: Run, compared: tuple[Evaluation, Evaluation] | None = None, judged: Judged | None = None) -> str:
    """The report in Markdown; `compared` and `judged` are as in `render_page`."""
    sections = [f"# {run.name}", f"**{verdict(run, compared, judged)}**", *_warnings(run)]
    sections += [_markdown(change_table([run]))]
    sections += [f"{len(run.rows)} steps; each column is the mean of {fifth(run.rows)}."]
    if sampling := sampling_text(run.rows):
        sections += [f"Dynamic sampling: {sampling}."]
    if validations := validation_table(run):
        sections += ["Validation:", _markdown(validations)]
    if noise := stage_table(run.rows):
        sections += [_markdown(noise)]
        sections += [
            "Means by noise stage. entropy is the trained policy's, sampling entropy that of the policy that sampled."
        ]
    if compared:
        both = [evaluation_cells(each) for each in compared]
        names = [name for name in ("accuracy", "95% interval", "truncated", "no answer") if name in both[0]]
        cells = [[name, *(each[name] for each in both)] for name in names]
        sections += [_markdown(([both[0]["task"], "before", "after"], cells))]
        sections += [*([judged.text] if judged else []), *(_pair(pair) for pair in pairs(*compared))]
    return printable("\n\n".join(sections)) + "\n"


def render_texts(runs: Sequence[Run], judged: Judged | None = None) -> str:
    """What the terminal shows of several runs, in Markdown: where they differ, the verdicts, the means side by side."""
    sections = [f"# {_title(runs)}"]
    if found := [[key, *(value and f"`{value}`" for value in values)] for key, *values in differences(runs)]:
        sections += ["Where the runs differ:", _markdown((["key", *(run.name for run in runs)], found))]
    for run in runs:
        sections += [f"**{run.name}**: {verdict(run)}", *_warnings(run)]
    sections += [_markdown(change_table(runs)), *([judged.text] if judged else [])]
    return printable("\n\n".join(sections)) + "\n"


def _title(runs: Sequence[Run]) -> str:
    return f"{'Runs' if len(runs) > 1 else 'Run'} {' and '.join(run.name for run in runs)}"


def _warnings(run: Run) -> list[str]:
    found = [f"- step {steps}: {text}" for steps, text in latest_warnings(run)]
    return ["Warnings while it ran:", "\n".join(found)] if found else []


def _markdown(table: Table) -> str:
    heading, cells = table
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, ["---"] * len(heading), *cells))


def _pair(pair: Pair) -> str:
    marks = ["right" if row["correct"] else "wrong" for row in pair]
    return (
        f"**{pair.before['question'].strip()}** (answer {pair.before['answer']})\n\n"
        f"- before ({marks[0]}): `{_one_line(pair.before['completion'])}`\n"
        f"- after ({marks[1]}): `{_one_line(pair.after['completion'])}`"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")[:300]


logger = logging.getLogger(__name__)


def _is_page(path: Path) -> bool:
    """Whether a file begins as a page of ours does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096).decode("utf-8", "replace").lower()
    return head.lstrip().startswith("<!doctype html>") and POLICY in head


def write_report(
    folders: Sequence[Path],
    before: Path | None = None,
    after: Path | None = None,
    out: Path | None = None,
    judged: Judged | None = None,
) -> Path:
    """Print the report, write the page and return its path.

    `judged` says whether `before` and `after` differ significantly. The page alone is written to `out`, by default
    report.html, report.md and curves.png in the run's folder, or comparison.html in the first run's folder. Raises
    DataError for a run without metrics, ConfigError for options that do not go together, or a place that cannot be
    written.
    """
    if (before is None) != (after is None):
        raise ConfigError("a comparison needs both: write `--before FOLDER --after FOLDER`, or neither")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder: give the file to write, such as {out / 'report.html'}")
    if out is not None and os.path.lexists(out) and not _is_page(out):
        raise ConfigError(
            f"--out {out} is there and is no page that qerl wrote: it is left as it is, name another file"
        )
    runs = read_runs(folders)
    read = partial(read_evaluation, shape=ComparedResult)
    compared = (read(before), read(after)) if before and after else None
    page = out or runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html")
    text = render_text(runs[0], compared, judged) if len(runs) == 1 else render_texts(runs, judged)
    SafeConsole().print(Markdown(text))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_page(runs, compared, judged), encoding="utf-8")
        if len(runs) == 1 and out is None:
            report, drawn = (page.with_name(name) for name in ("report.md", "curves.png"))
            report.write_text(text, encoding="utf-8")
            curves(runs).savefig(drawn, dpi=110)
            logger.info("report: %s, curves: %s", report, drawn)
    except OSError as error:
        if refusal_of(error):
            raise
        raise ConfigError(
            f"{page.parent} cannot be written ({error.strerror}): give another file with --out"
        ) from error
    logger.info("page: %s", page)
    return page
