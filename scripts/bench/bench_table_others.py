"""The tables of benchmarks/ that come from a single file, `<kind>-<shape>.json`, with one drawing function per kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
SCRIPTS = Path(__file__).resolve().parents[1]


def sections(folder: Path) -> list[str]:
    """Heading, table and command of each such file in `folder`, kind by kind."""
    lines: list[str] = []
    for kind, (heading, draw) in KINDS.items():
        for path in sorted(folder.glob(f"{kind}-*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            shape = path.stem.removeprefix(f"{kind}-").upper()
            lines += [f"## {heading.format(shape=shape)}", "", *draw(result), "", *commands({kind: result}), ""]
    return lines


def commands(results: dict[str, Result]) -> list[str]:
    """The commands that wrote a table's files, and the card if a file names it (None: a CPU)."""
    gpus = sorted({result["gpu"] or "CPU" for result in results.values() if "gpu" in result})
    return [
        f"On {', '.join(gpus)}:" if gpus else "By:",
        "",
        *(f"    {_as_typed_today(result['command'])}" for result in results.values()),
    ]


def _as_typed_today(command: str) -> str:
    """A recorded command with the present path of its script: scripts were moved into folders after the measurement."""
    script, _, options = command.partition(" ")
    moved = next((path for path in SCRIPTS.glob(f"*/{Path(script).name}")), None)
    return f"{moved.relative_to(SCRIPTS.parent)} {options}" if moved else command


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_line(head), "|---" * len(head) + "|", *map(_line, rows)]


def attention(result: Result) -> list[str]:
    """Microseconds of our kernel, of FlashAttention and of the limit, by number of sequences and length."""
    rows = result["us"]
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    cells: dict[int, dict[Any, str]] = {}
    for row in rows:
        text = f"{row['ours']:.1f} / {row['flash']:.1f} / {row['limit']:.1f}"
        cells.setdefault(row["sequences"], {})[row["tokens"]] = text
    head = ["us: ours / FlashAttention 3 / limit", *(f"{n} tokens" if n != "mixed" else "64 to 1000" for n in lengths)]
    named = {1: "1 sequence"}
    lines = [[named.get(n, f"{n} sequences"), *(by.get(length, "") for length in lengths)] for n, by in cells.items()]
    return table(head, lines)


def startup(result: Result) -> list[str]:
    """Seconds of each start: of the process, of the engine, and of the engine's parts."""
    starts = result["starts"]
    parts = list(dict.fromkeys(part for start in starts for part in start["startup_s"]))
    rows = [["the process", *(f"{start['process_s']:.1f}" for start in starts)]]
    rows.append(["the engine", *(f"{sum(start['startup_s'].values()):.1f}" for start in starts)])
    rows += [[f"of it {part}", *(f"{start['startup_s'].get(part, 0):.1f}" for start in starts)] for part in parts]
    return table(["s", *(f"start {number + 1}" for number in range(len(starts)))], rows)


def peaks(result: Result) -> list[str]:
    """The peak of each process as the driver saw it, less what was taken before, and the largest values in its log."""
    keys = ("memory/rollout_card_gib", "memory/train_card_gib", "memory/train_gib", "memory/train_planned_gib")
    rows = []
    for name, peak in result["peak_gib"].items():
        steps = result["steps"].get(name, [])[-1 if name == "resume" else 0 :]  # earlier ones are not the resumed run's
        found = [[step[key] for step in steps if key in step] for key in keys]
        rows.append([name, f"{peak:.1f}", *(f"{max(values):.1f}" if values else "" for values in found)])
    head = [
        "GiB",
        "driver's peak less before",
        "card in a rollout",
        "in training",
        "allocated by training",
        "planned for it",
    ]
    return table(head, rows)


def qat(result: Result) -> list[str]:
    """Seconds, memory and mismatch of the first, the second and the last step, and the bytes after it."""
    keys = ("time/step_s", "time/rollout_s", "time/train_s", "time/optimizer_s", "time/sync_s")
    more = ("memory/peak_gib", "mismatch_kl")
    steps = result["steps"]
    chosen = [step for number, step in enumerate(steps) if number in (0, 1, len(steps) - 1)]
    rows = [
        [f"{step['step']}", *(f"{step[k]:.3g}" for k in keys), *(f"{step[k]:.3g}" for k in more)] for step in chosen
    ]
    lines = table(["step", "s", "rollout s", "training s", "optimizer s", "sync s", "peak GiB", "mismatch_kl"], rows)
    if sync := result.get("sync"):
        wrong, moved = len(sync["different"]), len(sync["moved"])
        lines += ["", f"After the last step {wrong} of {sync['linears']} linears differ from the reference's bytes of"]
        lines[-1] += f" their masters, and {moved} have moved. Driver's peak: {result['peak_driver_gib']} GiB."
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


KINDS: dict[str, tuple[str, Callable[[Result], list[str]]]] = {  # in the order of the page
    "attention": ("Attention of a decode step, a layer, {shape} shape", attention),
    "startup": ("Starting the engine, {shape} shape", startup),
    "peaks": ("GPU memory of training, resuming and evaluating, {shape} shape", peaks),
    "qat": ("Training through the quantizer, {shape} shape", qat),
}
