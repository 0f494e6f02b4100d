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


def profile(result: Result) -> list[str]:
    """Phases (or numbers of sequences) with their shares of the limits, and the time of the GPU by category."""
    limits, phases = result["limits"], result.get("phases") or result["decode"]
    names = [name if "phases" in result else f"{name} sequences" for name in phases]
    shares = [
        [
            f"{phase['wall_ms']:.1f}",
            f"{phase['busy_ms']:.1f}",
            _percent(phase.get("share_of_bandwidth")),
            _percent(phase.get("share_of_matrix_rate")),
        ]
        for phase in phases.values()
    ]
    labels = list(dict.fromkeys(label for phase in phases.values() for label in phase["categories_ms"]))
    kept_up = f", {limits['sustained_tflops']:.0f} for a second" if "sustained_tflops" in limits else ""
    lines = [
        f"Limits, measured in the same run: {limits['tflops']:.0f} TFLOP/s in a burst{kept_up}, "
        f"{limits['gb_per_s']:.0f} GB/s.",
        "",
        *table(
            ["", "wall ms", "GPU busy ms", "needed bytes, of the bandwidth", "needed flops, of the matrix rate"],
            [[name, *cells] for name, cells in zip(names, shares, strict=True)],
        ),
        "",
        *table(
            ["GPU's ms", *names],
            [
                [label, *(f"{phase['categories_ms'].get(label, 0):.1f}" for phase in phases.values())]
                for label in labels
            ],
        ),
    ]
    for phase in phases.values():
        if "decoded_gb" in phase:
            share, milliseconds = phase["share_of_bandwidth_decoding"], phase["categories_ms"]["decode weights"]
            moved = f"{phase['decoded_gb']:.0f} GB in {milliseconds:.1f} ms"
            lines += ["", f"The weights were decoded at {share:.0%} of the bandwidth ({moved})."]
    if any("share_of_bandwidth" in phase and "needed_gb" not in phase for phase in phases.values()):
        lines += ["", "Measured before adapter, keys and values counted as needed bytes and `attend` as attention."]
    return lines


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


def elementwise(result: Result) -> list[str]:
    rows = [
        [name, f"{r['us']:.1f}", f"{r['limit_us']:.1f}", _percent(r["limit_us"] / r["us"]), f"{r['torch_us']:.1f}"]
        for name, r in result["results"].items()
    ]
    return table(["", "us", "limit us", "of the limit", "plain torch us"], rows)


def gemm(result: Result) -> list[str]:
    """Microseconds by shape, way and number of tokens."""
    tokens = list(dict.fromkeys(row["tokens"] for row in result["results"]))
    cells: dict[str, dict[int, str]] = {}
    for row in result["results"]:
        cells.setdefault(f"{row['shape']}, {row['way']}", {})[row["tokens"]] = f"{row['us']:.1f}"
    rows = [[name, *(by_tokens.get(count, "") for count in tokens)] for name, by_tokens in cells.items()]
    return table(["us", *map(str, tokens)], rows)


def layers(result: Result) -> list[str]:
    rows = [
        [name, f"{r['ms']:.2f}", f"{r['over_floor']:.2f}", f"{r['kept_mib']:.0f}", f"{r['peak_mib']:.0f}"]
        for name, r in result["results"].items()
    ]
    return table(["", "ms", "over the products", "kept MiB", "peak MiB"], rows)


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


def pack(result: Result) -> list[str]:
    """Milliseconds of packing all masters against the limit, and of stock vLLM's reload."""
    rows, reload = [], result.get("stock_reload", {})
    for dtype, found in result["masters"].items():
        share = _percent(found["share_of_limit"])
        rows.append([f"{dtype} masters", f"{found['ms']:.1f}", f"{found['limit_ms']:.1f}", share])
        rows.append([f"{dtype} masters, in plain torch", f"{found['twin_ms']:.0f}", "", ""])
    if "median_s" in reload:
        rows.append(["stock vLLM's `reload_weights`", f"{1e3 * reload['median_s']:.0f}", "", ""])
    return table(["", "ms", "limit ms", "of the limit"], rows)


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


def engines(result: Result) -> list[str]:
    last = max(1, len(result["runs"][0]["reward"]) // 3)
    rows = [
        [
            f"{run['engine']}, seed {run['seed']}",
            f"{sum(run['reward'][-last:]) / last:.3f}",
            f"{max(run['mismatch_kl']):.1e}",
        ]
        for run in result["runs"]
    ]
    return table(["", f"mean reward of the last {last} steps", "largest mismatch_kl"], rows)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


KINDS: dict[str, tuple[str, Callable[[Result], list[str]]]] = {  # in the order of the page
    "profile-step": ("Where a step's time goes, {shape} shape", profile),
    "profile-decode": ("Where a decode step's time goes, {shape} shape", profile),
    "layers": ("A decoder layer forward and backward, {shape} shape", layers),
    "elementwise": ("The kernels around the products of training, {shape} shape", elementwise),
    "attention": ("Attention of a decode step, a layer, {shape} shape", attention),
    "gemm": ("Ways to multiply by a weight, {shape} shape, by number of tokens", gemm),
    "startup": ("Starting the engine, {shape} shape", startup),
    "peaks": ("GPU memory of training, resuming and evaluating, {shape} shape", peaks),
    "pack": ("Packing all masters, {shape} shape", pack),
    "qat": ("Training through the quantizer, {shape} shape", qat),
    "engines": ("Both rollout engines, {shape} model", engines),
}
