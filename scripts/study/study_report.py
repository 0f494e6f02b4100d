"""The tables and the picture of scripts/study/study_noise.py and study_qat.py, from their results; needs no GPU.

Accuracy is greedy, on rows that were used neither in training nor to choose the rate. Intervals are 95%:

1. For an accuracy, or a difference of two arms on the same questions and seeds, the interval has two parts that are
   added in quadrature: Student's t over the means of the seeds, and the normal distribution over the means of the
   questions. The randomness of a seed is in both parts, so the interval is too wide rather than too narrow.
2. For a reward, a slope or a difference of these it is Student's t over the seeds, with one value per seed. A single
   seed has no interval.

A reward "rises" if the interval of its slopes is above 0, where a slope is that of the least squares line through the
reward of one seed over the steps. The problems of each step are new to the training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from study_arms import ARMS

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # by degrees of freedom
PAIRS = (  # reference, arm
    ("bf16", "nvfp4"), ("bf16", "nf4"), ("bf16", "nvfp4_aqn"), ("bf16", "nvfp4_aqn_both"),
    ("nvfp4", "nvfp4_aqn"), ("nvfp4", "nvfp4_aqn_both"), ("nvfp4", "nvfp4_aqn_x10"),
    ("nvfp4", "qat"), ("bf16_weights", "qat"), ("no_qat", "qat"),
    ("qat", "qat_fp8_gradients"),
    ("bf16", "fp8"), ("bf16_weights", "fp8_both"), ("bf16_weights", "fp8_rollout"), ("fp8_rollout", "fp8_both"),
    ("nvfp4", "nvfp4_rounded"), ("nvfp4", "packed_in"), ("nvfp4_rounded", "packed_in"),
    ("dense", "experts_shared"), ("dense", "experts_per_expert"), ("dense", "experts_none"),
    ("experts_shared", "experts_per_expert"), ("experts_none", "experts_shared"),
)  # fmt: skip

Runs = Sequence[dict[str, Any]]


def write_report(results: Path, images: Path) -> None:
    """Write `<results>.md` beside the results, and `<images>/<results>.png`."""
    import study_figure

    found = json.loads(results.read_text(encoding="utf-8"))
    images.mkdir(parents=True, exist_ok=True)
    study_figure.draw(found, images / f"{results.stem}.png")
    script = script_of(found)
    place = results.name if script == "study_noise" else f"{script.removeprefix('study_')}/{results.name}"
    results.with_suffix(".md").write_text(page(found, place), encoding="utf-8")


def page(results: dict[str, Any], name: str) -> str:
    """The whole text of the Markdown file beside the results, which are `name` in benchmarks/."""
    script = script_of(results)
    settings, machine = results["settings"], results["machine"]
    versions = ", ".join(f"{key} {machine['versions'][key]}" for key in ("torch", "transformers", "trl", "peft"))
    lines = [
        f"Drawn by `python scripts/study/{script}.py report benchmarks/{name}` from that file: {settings['base']}, "
        f"task {settings['task']}, {settings['steps']} steps, {settings['test_rows']} test and "
        f"{settings['validation_rows']} validation problems, engine {settings['engine']}; {machine['device']}, "
        f"{versions}.",
    ]
    for title, table in (
        ("What each arm reached", arms_table(results)),
        ("Arms against each other", pairs_table(results)),
        ("The sweep", sweep_table(results)),
        ("What the noise did to the sampler", noise_table(results)),
        ("Sampler against trainer", mismatch_table(results)),
    ):
        if len(table) < 2:
            continue
        lines += ["", f"**{title}**", "", *table]
    if results["failed"]:
        lines += ["", f"Failed: {', '.join(results['failed'])}."]
    return "\n".join(lines) + "\n"


def script_of(results: dict[str, Any]) -> str:
    """The script that made these results."""
    arms = {run["arm"] for run in results["runs"].values()}
    if any(arm.startswith("experts") for arm in arms):
        return "study_experts"
    if not of_weights(results):
        return "study_noise"
    return "study_fp8" if any(arm.startswith("fp8") for arm in arms) else "study_qat"


def of_weights(results: dict[str, Any]) -> bool:
    """Whether these are the results of scripts/study/study_qat.py, which has arms that train through the quantizer."""
    arms = [ARMS[run["arm"]] for run in results["runs"].values()]
    return any(arm.way or arm.packed_in for arm in arms)


def trained(results: dict[str, Any], arm: str) -> dict[float, Runs]:
    """The runs of an arm by learning rate, each list in the order of the seeds."""
    runs: dict[float, list[dict[str, Any]]] = {}
    for row in sorted((r for r in results["runs"].values() if r["rate"] is not None), key=lambda r: r["seed"]):
        if row["arm"] == arm:
            runs.setdefault(row["rate"], []).append(row)
    return dict(sorted(runs.items()))


def candidates(results: dict[str, Any], arm: str) -> dict[float, Runs]:
    """The runs of an arm at the rates that may be chosen, which are those with the most seeds."""
    runs = trained(results, arm)
    most = max(map(len, runs.values()), default=0)
    return {rate: rows for rate, rows in runs.items() if len(rows) == most}


def finals(results: dict[str, Any], arm: str) -> Runs:
    """The runs of an arm that are reported: those at the rate with the most right validation answers.

    If several rates have equally many, it is the smallest of them.
    """
    runs = candidates(results, arm).values()
    return max(runs, key=lambda rows: sum(row["validation"].count("1") for row in rows), default=[])


def present(results: dict[str, Any]) -> list[str]:
    """The arms that have runs."""
    return [arm for arm in ARMS if finals(results, arm)]


def answers(runs: Runs, part: str = "test") -> np.ndarray:
    """An array (seeds, questions) with 1 for each right answer and 0 for others."""
    return np.array([[bit == "1" for bit in row[part]] for row in runs], dtype=float)


def over_seeds(values: Sequence[float]) -> float:
    """Half the width of the interval of a mean over seeds; NaN for a single seed."""
    if len(values) < 2:
        return float("nan")
    return T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def estimate(values: np.ndarray) -> tuple[float, float]:
    """The mean of `values` (seeds, questions), and half the width of its interval (item 1 at the top of this file)."""
    questions = values.mean(0)
    by_question = 1.96 * questions.std(ddof=1) / questions.size**0.5
    return float(values.mean()), float(np.hypot(over_seeds(list(values.mean(1))), by_question))


def slope(run: dict[str, Any]) -> float:
    """The slope, per step, of the least squares line through the run's reward."""
    rewards = run["steps"]["reward"]
    return float(np.polyfit(np.arange(len(rewards)), rewards, 1)[0])


def rises(runs: Runs) -> bool:
    """Whether the interval of the seeds' slopes is above 0."""
    slopes = [slope(run) for run in runs]
    return mean(slopes) - over_seeds(slopes) > 0


def paired(results: dict[str, Any], reference: str, arm: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The reported runs of two arms, in pairs with equal seeds."""
    first, second = ({run["seed"]: run for run in finals(results, name)} for name in (reference, arm))
    return [(first[seed], second[seed]) for seed in first if seed in second]


def arms_table(results: dict[str, Any]) -> list[str]:
    gpu = results["machine"]["device"] != "CPU"
    head = [
        "accuracy, %",
        "rate",
        "before",
        "after",
        "each seed",
        "reward, first and last fifth",
        "slope per step",
        "entropy",
    ]
    head += ["s per step", "GiB"] if gpu else []
    rows = [_head(head)]
    for arm in present(results):
        runs = finals(results, arm)
        base = [r for r in results["runs"].values() if r["rate"] is None and ARMS[r["arm"]].served == ARMS[arm].served]
        slopes = [slope(run) for run in runs]
        cells = [
            ARMS[arm].title,
            f"{runs[0]['rate']:g}",
            f"{100 * answers(base).mean():.1f}" if base else "",
            _plus_minus(*(100 * value for value in estimate(answers(runs))), ".1f"),
            " / ".join(f"{100 * value:.1f}" for value in answers(runs).mean(1)),
            " to ".join(f"{_fifth(runs, 'reward', last):.2f}" for last in (False, True)),
            f"{_plus_minus(mean(slopes), over_seeds(slopes), '.4f')}, {'rises' if rises(runs) else 'cannot tell'}",
            " to ".join(f"{_fifth(runs, 'sampling/entropy', last):.2f}" for last in (False, True)),
        ]
        if gpu:
            memory = max(value for run in runs for value in run["steps"]["memory/peak_gib"] if value is not None)
            cells += [f"{_fifth(runs, 'time/step_s', True):.1f}", f"{memory:.2f}"]
        rows.append(_line(cells))
    return rows


def pairs_table(results: dict[str, Any]) -> list[str]:
    rows = [_head(["", "accuracy, points", "mean reward of the run", "accuracy is"])]
    for reference, arm in PAIRS:
        pairs = paired(results, reference, arm)
        if not pairs:
            continue
        first, second = zip(*pairs, strict=True)
        difference, half = estimate(answers(second) - answers(first))
        rewards = [mean(b["steps"]["reward"]) - mean(a["steps"]["reward"]) for a, b in pairs]
        cells = [
            f"{ARMS[arm].title} against {ARMS[reference].title}",
            _plus_minus(100 * difference, 100 * half, "+.1f"),
            _plus_minus(mean(rewards), over_seeds(rewards), "+.3f"),
            "better" if difference > half else "worse" if difference < -half else "not told apart",
        ]
        rows.append(_line(cells))
    return rows


def sweep_table(results: dict[str, Any]) -> list[str]:
    """Accuracy on validation problems by rate, averaged over seeds; the chosen rate is bold."""
    rates = sorted({rate for arm in ARMS for rate in trained(results, arm)})
    rows = [_head(["validation accuracy by rate, % (seeds)", *(f"{rate:g}" for rate in rates)])]
    for arm in present(results):
        runs, chosen = trained(results, arm), finals(results, arm)[0]["rate"]
        cells = {rate: f"{100 * answers(runs[rate], 'validation').mean():.1f} ({len(runs[rate])})" for rate in runs}
        cells[chosen] = f"**{cells[chosen]}**"
        rows.append(_line([ARMS[arm].title, *(cells.get(rate, "") for rate in rates)]))
    return rows


def noise_table(results: dict[str, Any]) -> list[str]:
    """The first step with noise, against NVFP4 without noise at the same rate and seed, which was equal until then."""
    columns = ["runs", "sigma", "entropy of the sampler", "without", "mismatch_kl", "points more than without"]
    rows = [_head(["at the first step with noise", *columns])]
    clean = {(rate, run["seed"]): run for rate, runs in trained(results, "nvfp4").items() for run in runs}
    for arm in (arm for arm in present(results) if "aqn" in arm):
        found = []
        for rate, runs in trained(results, arm).items():
            for run in (run for run in runs if (rate, run["seed"]) in clean):
                steps, without = run["steps"], clean[rate, run["seed"]]["steps"]
                at = next(index for index, sigma in enumerate(steps["noise/sigma"]) if sigma)
                entropies = (steps["sampling/entropy"][at], without["sampling/entropy"][at])
                gain = 100 * float((answers([run]) - answers([clean[rate, run["seed"]]])).mean())
                found.append((steps["noise/sigma"][at], *entropies, steps["mismatch_kl"][at], gain))
        if found:
            sigma, noisy, quiet, mismatch, gain = np.array(found).mean(0)
            gains = [row[-1] for row in found]
            cells = [ARMS[arm].title, str(len(found)), f"{sigma:g}", f"{noisy:.4f}", f"{quiet:.4f}", f"{mismatch:.1e}"]
            rows.append(_line([*cells, f"{gain:+.1f} ({min(gains):+.1f} to {max(gains):+.1f})"]))
    return rows


def mismatch_table(results: dict[str, Any]) -> list[str]:
    """`mismatch_kl` over the run, averaged over the seeds; only where whole weights were trained."""
    rows = [_head(["mismatch_kl", "first step", "first fifth", "last fifth", "largest", "last fifth / first"])]
    for arm in present(results) if of_weights(results) else ():
        runs = finals(results, arm)
        first, last = (_fifth(runs, "mismatch_kl", late) for late in (False, True))
        begun = mean(run["steps"]["mismatch_kl"][0] for run in runs)
        largest = max(value for run in runs for value in run["steps"]["mismatch_kl"])
        values = (f"{value:.1e}" for value in (begun, first, last, largest))
        rows.append(_line([ARMS[arm].title, *values, f"{last / first:.1f}" if first else ""]))
    return rows


def _fifth(runs: Runs, name: str, last: bool) -> float:
    """The mean of a metric over the first or last fifth of the runs' steps."""
    count = max(1, len(runs[0]["steps"][name]) // 5)
    return mean(mean(run["steps"][name][-count:] if last else run["steps"][name][:count]) for run in runs)


def _plus_minus(value: float, half: float, form: str) -> str:
    """The value, and half the width of its interval if it has one."""
    return f"{value:{form}}" + ("" if np.isnan(half) else f" ± {half:{form.removeprefix('+')}}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(cells: Sequence[str]) -> str:
    return f"{_line(cells)}\n{'|---' * len(cells)}|"
