"""The tables and the picture of scripts/study/study_real.py, from its results; needs no GPU.

1. Accuracy is greedy, on rows that were not trained on. An arm's rate is the one whose reward over the last fifth of
   the steps is highest; the prompts of each step are new to the run, and the test rows decide nothing.
2. Intervals are 95%, by Student's t over the seeds: of an accuracy over the seeds of an arm, of a difference over the
   differences at equal seeds, which have equal prompts. The questions are the same in all runs, so an interval says how
   far other seeds may lie, and not how far other questions.
3. pass@k is the mean over questions of 1 - C(n - c, k) / C(n, k), with c of n samples right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from study_real_arms import ARMS, BF16, LONG

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T_95 += (2.120, 2.110, 2.101, 2.093)
KS = (1, 4, 16, 64)

Runs = list[dict[str, Any]]


def write_report(files: Sequence[Path], long: Sequence[Path], images: Path) -> None:
    """Write `<first file>.md` beside the results, and the picture `<images>/<first file>.png`.

    The arms of the files in `long` are those over the base of the first runs (LONG).
    """
    import study_real_figure

    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found += [with_long_arms(json.loads(file.read_text(encoding="utf-8"))) for file in long]
    results, files = merged(found), [*files, *long]
    images.mkdir(parents=True, exist_ok=True)
    study_real_figure.draw(results, images / f"{files[0].stem}.png")
    files[0].with_suffix(".md").write_text(page(results, files), encoding="utf-8")


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several calls as one. Exits if their settings differ."""
    results = found[0]
    for other in found[1:]:
        if other["settings"] != results["settings"]:
            raise SystemExit(f"these results have other settings: {other['settings']} and {results['settings']}")
        results = {**results, "runs": other["runs"] | results["runs"], "failed": other["failed"] | results["failed"]}
    return results


def with_long_arms(results: dict[str, Any]) -> dict[str, Any]:
    """Results whose arms over the default's base are named as those over the base of the first runs."""
    runs = {}
    for key, row in results["runs"].items():
        prefix = LONG if LONG + row["arm"] in ARMS else ""
        runs[prefix + key] = row | {"arm": prefix + row["arm"]}
    return results | {"runs": runs}


def page(results: dict[str, Any], files: Sequence[Path]) -> str:
    """The whole text of the Markdown file."""
    settings, machine = results["settings"], results["machine"]
    versions = ", ".join(f"{key} {machine['versions'][key]}" for key in ("torch", "transformers", "trl", "peft"))
    names = " ".join(file.name for file in files)
    lines = [
        f"Drawn by `python scripts/study/study_real.py report {names}`: SmolLM2-135M-Instruct, the "
        f"{settings['variant']} problems, {settings['steps']} steps, {settings['test_rows']} test rows, engine "
        f"{settings['engine']}; "
        f"{machine['device']}, {versions}.",
    ]
    tables = [("At each arm's best rate", best_table(results)), ("All rates", rates_table(results))]
    tables += [("pass@k", pass_table(results))]
    for title, rows in tables:
        if len(rows) > 2:
            lines += ["", f"**{title}**", "", *rows]
    if results["failed"]:
        lines += ["", f"Failed: {', '.join(results['failed'])}."]
    return "\n".join(lines) + "\n"


def by_rate(results: dict[str, Any], arm: str) -> dict[float, Runs]:
    """The runs of an arm by learning rate, each list in the order of the seeds."""
    found: dict[float, Runs] = {}
    for row in sorted(results["runs"].values(), key=lambda row: (row["rate"], row["seed"])):
        if row["arm"] == arm:
            found.setdefault(row["rate"], []).append(row)
    return found


def best(results: dict[str, Any], arm: str) -> Runs:
    """The runs of an arm at its best rate (item 1 at the top), of the rates with the most seeds; [] if it has none."""
    rates = by_rate(results, arm)
    most = max(map(len, rates.values()), default=0)
    return max((runs for runs in rates.values() if len(runs) == most), key=last_reward, default=[])


def present(results: dict[str, Any]) -> list[str]:
    """The arms that have runs."""
    return [arm for arm in ARMS if best(results, arm)]


def accuracy(row: dict[str, Any], when: str = "after") -> float:
    """The share of the test rows that a run answers right, in percent."""
    bits = row[when]["test"]
    return 100 * bits.count("1") / len(bits)


def last_reward(runs: Runs) -> float:
    """The mean reward over the last fifth of the steps."""
    return mean(mean(rewards(row)[-max(1, len(rewards(row)) // 5) :]) for row in runs)


def rewards(row: dict[str, Any]) -> list[float]:
    """The policy's success by step; with dynamic sampling that of everything that was sampled."""
    return row["steps"].get("sampled/reward") or row["steps"]["reward"]


def half_width(values: Sequence[float]) -> float:
    """Half the 95% interval of a mean over seeds; NaN for a single one."""
    if len(values) < 2:
        return float("nan")
    return T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / len(values) ** 0.5


def interval(values: Sequence[float], form: str = ".1f") -> str:
    """The mean with its interval, as text."""
    if not values:
        return ""
    half = half_width(values)
    return f"{mean(values):{form}}" + ("" if half != half else f" ± {half:{form.lstrip('+')}}")


def mean_reward(row: dict[str, Any]) -> float:
    """The mean reward over all steps, in percent: how fast a run learned, which scatters less than where it ended."""
    return 100 * mean(rewards(row))


def differences(runs: Runs, reference: Runs, of: Callable[[dict[str, Any]], float] = accuracy) -> list[float]:
    """Accuracy, or another number of a run, minus the reference's at equal seeds."""
    theirs = {row["seed"]: of(row) for row in reference}
    return [of(row) - theirs[row["seed"]] for row in runs if row["seed"] in theirs]


def before(results: dict[str, Any], arm: str) -> float | None:
    """The accuracy of an arm before its first step, in percent; None where no run measured it."""
    found = [accuracy(row, "before") for row in results["runs"].values() if row["arm"] == arm and row.get("before")]
    return found[0] if found else None


def best_table(results: dict[str, Any]) -> list[str]:
    head = [
        "",
        "rate",
        "seeds",
        "before, %",
        "after, %",
        "minus BF16",
        "each seed",
        "reward, last fifth",
        "reward, all steps, minus BF16",
        "mismatch_kl",
        "s",
    ]
    rows, reference = [_line(head), _line(["---"] * len(head))], best(results, BF16)
    for arm in present(results):
        runs = best(results, arm)
        was = before(results, arm)
        mismatch = [value for row in runs for value in row["steps"].get("mismatch_kl", []) if value is not None]
        cells = [
            ARMS[arm].title,
            f"{runs[0]['rate']:g}",
            str(len(runs)),
            "" if was is None else f"{was:.1f}",
            interval([accuracy(row) for row in runs]),
            "" if arm == BF16 else interval(differences(runs, reference), "+.1f"),
            " / ".join(f"{accuracy(row):.1f}" for row in runs),
            f"{last_reward(runs):.3f}",
            "" if arm == BF16 else interval(differences(runs, reference, mean_reward), "+.1f"),
            f"{mean(mismatch):.1e}" if mismatch else "",
            f"{mean(row['seconds'] for row in runs):.0f}",
        ]
        rows.append(_line(cells))
    return rows


def rates_table(results: dict[str, Any]) -> list[str]:
    """Accuracy after training by rate; the rate that is taken is bold."""
    rates = sorted({row["rate"] for row in results["runs"].values()})
    head = ["accuracy, % (seeds)", *(f"{rate:g}" for rate in rates)]
    rows = [_line(head), _line(["---"] * len(head))]
    for arm in present(results):
        taken, cells = best(results, arm)[0]["rate"], []
        for rate in rates:
            runs = by_rate(results, arm).get(rate, [])
            cell = f"{interval([accuracy(row) for row in runs])} ({len(runs)})" if runs else ""
            cells.append(f"**{cell}**" if rate == taken else cell)
        rows.append(_line([ARMS[arm].title, *cells]))
    return rows


def pass_table(results: dict[str, Any]) -> list[str]:
    """pass@k before and after training, of the arms whose runs sampled the test rows."""
    sampled = [arm for arm in present(results) if best(results, arm)[0]["after"].get("right")]
    if not sampled:
        return []
    samples = best(results, sampled[0])[0]["after"]["samples"]
    ks = [k for k in KS if k <= samples]
    head = ["%", *(f"pass@{k} before" for k in (ks[0], ks[-1])), *(f"pass@{k}" for k in ks)]
    rows = [_line(head), _line(["---"] * len(head))]
    for arm in sampled:
        runs = best(results, arm)
        untrained = [row["before"] for row in results["runs"].values() if row["arm"] == arm and row.get("before")]
        first = next((answers for answers in untrained if answers.get("right")), None)
        cells = [f"{100 * pass_at(first, k):.1f}" if first else "" for k in (ks[0], ks[-1])]
        cells += [interval([100 * pass_at(row["after"], k) for row in runs]) for k in ks]
        rows.append(_line([ARMS[arm].title, *cells]))
    return rows


def pass_at(answers: dict[str, Any], k: int) -> float:
    """The unbiased estimate of pass@k over the sampled questions (item 3 at the top)."""
    n = answers["samples"]
    return mean(1 - comb(n - right, k) / comb(n, k) for right in answers["right"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
