#!/usr/bin/env python3
"""Draw the tables and pictures of benchmarks/ from its JSON files, as the benchmark scripts wrote them.

    python3 scripts/bench/bench_table.py      # -> benchmarks/README.md, docs/images/rollout-7b.png

The page begins with `notes.md`, which is beside the files and written by hand. Rollouts come from
`rollout-<shape>-<name>.json`, written by scripts/bench/bench_rollout.py; steps from `step-<shape>-<name>.json`, written
by scripts/bench/bench_step.py and scripts/bench/bench_trl.py; the linears of a decoder layer from
`linear-<shape>-<name>.json`, written by scripts/bench/bench_linear.py; `KINDS` names the other files. If a file has
several steps, the first is left out, since it compiles. A ratio is against the first row of its table: stock vLLM in
BF16 with the adapter merged, if that was measured, or with LoRA; or TRL as it comes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

Result = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
NAMES = {  # last part of a file's name -> the name in the tables, in their order
    "merged": "stock vLLM 0.25.1, BF16 with the adapter merged",
    "bf16": "stock vLLM 0.25.1, BF16 + LoRA",
    "marlin": "stock vLLM 0.25.1, NVFP4 (Marlin) + LoRA",
    "trl": "TRL 1.16 as it comes: BF16 LoRA, vLLM colocate with sleep",
    "qerl": "qerl, NVFP4 + LoRA",
    "qerl-beside": "qerl, NVFP4 + LoRA, in turns with Marlin and without",
    "qerl-base": "qerl, NVFP4 without an adapter",
    "qerl-tokens9216": "qerl, NVFP4, `run.micro_batch_tokens: 9216`",
    "qerl-tokens18432": "qerl, NVFP4, `run.micro_batch_tokens: 18432`",
    "qerl-tokens32768": "qerl, NVFP4, `run.micro_batch_tokens: 32768`",
    "qerl-cap24": "qerl, NVFP4, `memory.cap_gib: 24`",
    "qerl-cap80": "qerl, NVFP4, `memory.cap_gib: 80`",
    "qerl-mixed": "qerl, NVFP4, geometric lengths of 1 to 1024, mean about 300",
    "trl-mixed": "TRL 1.16, geometric lengths of 1 to 1024, mean about 300",
}
MODELS = {"10b": "16 of the 48 layers of Qwen3-30B-A3B"}  # shapes that their size does not name
PHASES = (  # columns of a step's table, if a file has them: heading, metric, factor from seconds, digits
    ("grading ms", "time/reward_s", 1000, 0),
    ("forward s", "time/forward_s", 1, 2),
    ("backward s", "time/backward_s", 1, 2),
    ("optimizer ms", "time/optimizer_s", 1000, 0),
    ("wake and sleep s", "time/switch_s", 1, 2),
    ("other s", "time/other_s", 1, 2),
)
SPLIT_NOTE = (
    "In a row that has the phases, they add up to its step together with rollout and sync. A row without them, TRL's "
    "too, gives the step without its optimizer; qerl's rollout then includes waking and sleeping."
)
NOTES = {  # kind and shape -> circumstances that the files do not record
    ("rollout", "7b"): "All five come from one run: they measured in turns, after each engine had compiled alone, "
    "beside a 1.5B's on another card of the host. The host matters to stock vLLM, whose CPU needs 1.5 to 7 ms per "
    "step: on a busy one it had 17,716 and 22,464 tokens/s merged with 128 and 256 sequences.",
    ("rollout", "32b"): "qerl and BF16 measured in turns on one card, the other three in turns on another card of "
    "the same host, at the same time. What the adapter takes is computed from those three.",
    ("rollout", "10b"): "A mixture of experts, with an adapter of rank 16 on attention and experts. All three opened "
    "at the same time and measured in turns, with nothing else on the machine. Stock vLLM has its adapter on each "
    "expert, as it reads them.",
    ("step", "7b"): "TRL and qerl ran in pairs, one after the other on one card, beside three other cards' work. "
    "qerl's two steps there took 7.0 and 7.5 s. In the second, 0.3 s of training were neither forward nor backward, "
    "in the first 0.04 s, and training reached 62.8 and 68.2% of the matrix rate. The rows with a number of tokens "
    "come from another machine with nothing else on it, at commit 549ffe0. Rollouts then still held 22 to 27 GiB of "
    "the card from the second step on; now they hold 19. The plan takes 18432 tokens, which cuts a step into 4 "
    "micro-batches (68.6 and 68.0%). With 32768 tokens one of the two steps trained only 120 of its 128 rows, "
    "because the rewards of a group were equal; the other trained for 3.53 s, against 3.56 s with 18432 tokens. The "
    "matrix rate, of a burst of 13 products, is each run's own: 782 to 789 TFLOP/s, and 812 with mixed lengths; for "
    "a whole second the card sustains 660 (below). The step under 24 GiB comes from commit 926396c, with "
    "micro-batches of 3072 tokens. Beside tests that compiled kernels, steps of 3e6c7ee, a608638 and 85f748d took "
    "8.2, 7.9 and 10.4 s, of which 4.7, 4.6 and 6.5 s were training.",
    ("step", "32b"): "This is the first step, which includes compiling.",
    ("step", "70b"): "This is the first step, which includes compiling.",
}


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
    moved = next((path for path in (ROOT / "scripts").glob(f"*/{Path(script).name}")), None)
    return f"{moved.relative_to(ROOT)} {options}" if moved else command


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


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


KINDS: dict[str, tuple[str, Callable[[Result], list[str]]]] = {  # in the order of the page
    "attention": ("Attention of a decode step, a layer, {shape} shape", attention),
    "startup": ("Starting the engine, {shape} shape", startup),
    "peaks": ("GPU memory of training, resuming and evaluating, {shape} shape", peaks),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    (arguments.folder / "README.md").write_text(page(arguments.folder), encoding="utf-8")
    arguments.images.mkdir(parents=True, exist_ok=True)
    for shape, results in read(arguments.folder, "rollout").items():
        draw_rollout(shape, results, arguments.images / f"rollout-{shape}.png")


def read(folder: Path, kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The results of one kind: shape -> name -> content of the file, in the order of NAMES."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in folder.glob(f"{kind}-*-*.json"):
        _, shape, name = path.stem.split("-", 2)
        found.setdefault(shape, {})[name] = json.loads(path.read_text(encoding="utf-8"))
    rank = {name: index for index, name in enumerate(NAMES)}
    shapes = sorted(found, key=lambda shape: float(shape.rstrip("b")))
    return {s: dict(sorted(found[s].items(), key=lambda item: rank.get(item[0], len(rank)))) for s in shapes}


def page(folder: Path) -> str:
    """The whole of `folder`/README.md: the notes, then a section for each kind of file in the folder."""
    rollouts, steps, layers = (read(folder, kind) for kind in ("rollout", "step", "linear"))
    lines = ["# Benchmarks", "", "<!-- `python3 scripts/bench/bench_table.py` writes this page: edit notes.md. -->", ""]
    if (folder / "notes.md").exists():
        lines += [(folder / "notes.md").read_text(encoding="utf-8")]
    for shape, results in rollouts.items():
        lines += [f"## Decode tokens/s, {model(shape)}, by number of sequences", "", *rollout_table(results), ""]
        lines += [*noted("rollout", shape), *commands(results), ""]
    for shape, results in steps.items():
        lines += [f"## A training step, {shape.upper()} shape", "", *step_table(results), ""]
        lines += [*noted("step", shape), *commands(results), ""]
    for shape, results in layers.items():
        lines += [f"## The linears of a decoder layer, {shape.upper()} shape", ""]
        for result in results.values():
            lines += [*layer_table(result), "", *linear_table(result), ""]
        lines += [*commands(results), ""]
    return "\n".join(lines + sections(folder)).rstrip() + "\n"


def model(shape: str) -> str:
    return MODELS.get(shape, f"{shape.upper()} shape")


def noted(kind: str, shape: str) -> list[str]:
    return [NOTES[kind, shape], ""] if (kind, shape) in NOTES else []


def rollout_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One row per engine; each rate is followed by its ratio to that of the first row."""
    first = next(iter(results.values()))["decode_tokens_per_s"]
    counts = list(first)
    rows = [f"| | {' | '.join(counts)} |", "|---" * (len(counts) + 1) + "|"]
    for name, result in results.items():
        rates = result["decode_tokens_per_s"]
        cells = [f"{rates[c]:.0f} ({rates[c] / first[c]:.2f})" if c in rates else "" for c in counts]
        rows.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    adapted = "qerl-beside" if "qerl-beside" in results else "qerl"
    if {adapted, "qerl-base"} <= results.keys():
        with_one, without = (results[name]["decode_tokens_per_s"] for name in (adapted, "qerl-base"))
        cells = [f"{1 - with_one[c] / without[c]:.1%}" if c in with_one and c in without else "" for c in counts]
        rows.append(f"| what the adapter takes | {' | '.join(cells)} |")
    return rows


def step_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Seconds by phase, memory as the driver saw it, and mismatch: means over the steps after the first.

    "of the matrix rate" divides training's needed flops by the rate measured after the run, if the file has it. "extra"
    are the rollouts with which dynamic sampling replaced groups without variance (the rewards are random). Phases that
    no file of the table has get no column.
    """
    counted = {name: result["steps"][1:] or result["steps"] for name, result in results.items()}
    split = phases(counted.values())
    heading = ["step s", "rollout s", "of it extra s", "train s", "of the matrix rate", "sync ms"]
    heading += [*(name for name, *_ in split), "GPU memory GiB", "mismatch_kl"]
    rows = [f"| | {' | '.join(heading)} |", "|---" * (len(heading) + 1) + "|"]
    for name, steps in counted.items():
        cells = [
            _text(_mean(steps, "time/step_s", "step_time"), 1),
            _text(_mean(steps, "time/rollout_s"), 1),
            _text(_mean(steps, "time/extra_rollouts_s"), 1),
            _text(_mean(steps, "time/train_s"), 1),
            _percent(_mean(steps, "train_share_of_matrix_rate")),
            _text(_mean(steps, "time/sync_s", scale=1000), 0),
            *(_text(_mean(steps, key, scale=scale), digits) for _, key, scale, digits in split),
            _text(results[name].get("peak_driver_gib"), 1),
            _text(_mean(steps, "mismatch_kl"), 4),
        ]
        rows.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    return [*rows, "", SPLIT_NOTE] if split else rows


def phases(files: Iterable[list[dict[str, Any]]]) -> list[tuple[str, str, int, int]]:
    """The members of PHASES that a step of any file has."""
    logged = {key for steps in files for step in steps for key in step}
    return [each for each in PHASES if each[1] in logged]


def layer_table(result: dict[str, Any]) -> list[str]:
    """Sums over the four linears, one row per number of tokens: by default ways, by the fastest ways, and in BF16."""
    head = (
        "default ways us",
        "of the limit",
        "LoRA adds",
        "BF16 + LoRA us",
        "LoRA adds",
        "over ours",
        "fastest ways us",
    )
    rows = [f"| tokens, rank {result['rank']} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    sums: dict[int, dict[str, Any]] = {}
    for row in result["layer"]:
        sums.setdefault(row["tokens"], {})[row["choice"]] = row
    for tokens, choices in sums.items():
        default, fastest, stock = choices.get("default", {}), choices.get("fastest", {}), next(iter(choices.values()))
        cells = [_text(default.get("us"), 1), _percent(default.get("share")), _percent(default.get("lora_cost"))]
        cells += [_text(stock["bf16_lora_us"], 1), _percent(stock["bf16_lora_cost"])]
        cells += [_text(default.get("over_bf16_lora"), 2), _text(fastest.get("us"), 1)]
        rows.append(f"| {tokens} | {' | '.join(cells)} |")
    return rows


def linear_table(result: dict[str, Any]) -> list[str]:
    """Each linear with its adapter: microseconds and share of the limit, one row per way."""
    counts = list(dict.fromkeys(row["tokens"] for row in result["results"]))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in result["results"]:
        if row["adapter"]:
            text = f"{row['us']:.1f} ({100 * row['share']:.0f}%)"
            cells.setdefault((row["linear"], row["way"]), {})[row["tokens"]] = text
    rows = [f"| with LoRA, us (of the limit) | {' | '.join(map(str, counts))} |", "|---" * (len(counts) + 1) + "|"]
    for (linear, way), by_tokens in cells.items():
        rows.append(f"| {linear}, {way} | {' | '.join(by_tokens.get(count, '') for count in counts)} |")
    return rows


def draw_rollout(shape: str, results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the rates relative to the first engine's, with a group of bars for each number of sequences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = next(iter(results.values()))["decode_tokens_per_s"]
    counts, width = list(first), 0.8 / len(results)
    figure, axes = plt.subplots(figsize=(8.5, 4), layout="constrained")
    for index, (name, result) in enumerate(results.items()):
        rates = result["decode_tokens_per_s"]
        places = [place + (index - (len(results) - 1) / 2) * width for place in range(len(counts))]
        heights = [rates.get(count, 0) / first[count] for count in counts]
        bars = axes.bar(places, heights, width * 0.94, label=NAMES.get(name, name).replace("`", ""))
        axes.bar_label(bars, [f"{rates.get(count, 0):.0f}" for count in counts], fontsize=6, padding=1)
    axes.set_xticks(range(len(counts)), counts)
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("tokens/s over stock BF16")
    axes.set_title(f"Decode, {model(shape)} with a LoRA adapter (tokens/s on the bars)", fontsize=10)
    figure.legend(fontsize=7, ncols=2, loc="outside lower center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _mean(steps: list[dict[str, Any]], *keys: str, scale: float = 1.0) -> float | None:
    values = [scale * step[key] for step in steps for key in keys if step.get(key) is not None]
    return mean(values) if values else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
