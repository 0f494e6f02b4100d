#!/usr/bin/env python3
"""What does distillation bring back of what rounding to 4 bits cost? Accuracy on held-out questions, and the KL.

    python scripts/study/study_distill.py --base qerl/tiny --task arith --engine transformers --parallel 1 \\
        --steps 100 --prompts 32 --tokens 48 --questions 1024 --out benchmarks/distillation/tiny.json
    python scripts/study/study_distill.py --base checkpoints/arith-21m --parallel 5 --memory-gib 12 \\
        --out benchmarks/distillation/arith-21m.json

For each seed the recipe qad_tiny runs on the 16-bit model: whole weights through the quantizer, with that model as the
teacher. Then the 16-bit model, the packed model that the runs begin with (rounded to nearest) and the results answer
the same problems of the test split, greedily. The share that came back is (result - rounded) / (16 bits - rounded), of
accuracies over all seeds; its interval is by bootstrap over questions.

The KL is measured on completions that the 16-bit model samples once, at temperature 1, for other problems of the test
split (scripts/study/held_out_kl.py). There the mean of KL(teacher || student) per token is that of whole completions.
A step's own KL is of so few tokens that it scatters by more than training changes; the file has those of all steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

DRAWS = 2000  # of the bootstrap
KEYS = ("kl_to_teacher/forward", "kl_to_teacher/reverse")
KL_QUESTIONS = 1024  # at most: each costs a forward pass of each model, and they are many tokens


def main() -> None:
    given = options()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from held_out_kl import divergences, write_problems

    from scripts.bench.provenance import machine

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(given.parallel) as pool:
        problems = Path(work) / "problems.jsonl"
        others = write_problems(given.task, given.questions, problems)
        runs = [Path(work) / f"run-{seed}" for seed in given.seeds]
        models = [runs[0] / "base", *(run / "model" for run in runs)]
        folders = [Path(work) / f"eval-{number}" for number in range(1 + len(models))]
        training = [pool.submit(distilled, given, *job) for job in zip(given.seeds, runs, strict=True)]
        answers = [pool.submit(evaluated, given, problems, Path(given.base), folders[0])]
        for each in training:
            each.result()
        answers += [pool.submit(evaluated, given, problems, *job) for job in zip(models, folders[1:], strict=True)]
        kls = divergences(given.base, models, given.task, others[:KL_QUESTIONS], given.tokens)
        for each in answers:
            each.result()
        right = [correct(folder) for folder in folders]
        steps = [[[row[key] for key in KEYS] for row in metrics(run)] for run in runs]
    result = {
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "seconds": round(time.perf_counter() - began, 1),
        "machine": machine(),
        "accuracy": accuracies(right),
        "came_back": share_back(right[0], right[1], right[2:]),
        "kl": {direction: falls([each[direction] for each in kls]) for direction in ("forward", "reverse")},
        "steps": steps,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="16-bit model")
    parser.add_argument("--task", default="arith_chain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quant-cfg", default="nvfp4_w4a16", help="preset or file: qat.quant_cfg")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=128, help="prompts per step, of two completions each")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe, last")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens at most")
    parser.add_argument("--questions", type=int, default=8192, help="test problems")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--parallel", type=int, default=1, help="processes at once")
    parser.add_argument("--memory-gib", type=float, help="of the card for each process")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def qerl(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "qerl.cli.main", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"qerl {' '.join(map(str, words))} failed:\n{done.stderr[-3000:]}")


def distilled(given: argparse.Namespace, seed: int, out: Path) -> None:
    """One run of the recipe; where there are several cards, seeds take them in turns."""
    from qerl.base.devices import visible_cards

    cards = visible_cards()
    card = ["--gpu", cards[given.seeds.index(seed) % len(cards)].index] if len(cards) > 1 else []
    keys = {
        "data.task": given.task,
        "qat.quant_cfg": given.quant_cfg,
        "distill.beta": given.beta,
        "optim.learning_rate": given.rate,
        "optim.beta2": 0.95,
        "rollout.engine": given.engine,
        "rollout.prompts_per_step": given.prompts,
        "rollout.max_new_tokens": given.tokens,
        "run.save_every": given.steps,
        "logging.completions_count": 0,
        **({"memory.cap_gib": given.memory_gib} if given.memory_gib else {}),
    }
    values = [*(f"{key}={value}" for key, value in keys.items()), *given.set]
    sets = [word for value in values for word in ("--set", value)]
    named = ["--model", given.base, "--steps", given.steps, "--seed", seed, *card]
    qerl("distill", "--recipe", "qad_tiny", *named, *sets, "--out", out)


def evaluated(given: argparse.Namespace, problems: Path, model: Path, out: Path) -> None:
    """Greedy answers of a model to the problems."""
    more = ["--cap-gib", given.memory_gib] if given.memory_gib else []
    more += ["--load", "bf16"] if model == Path(given.base) else []
    words = ["eval", given.task, "--model", model, "--data", problems, "--max-new-tokens", given.tokens]
    qerl(*words, "--temperature", 0, "--engine", given.engine, *more, "--out", out)


def correct(folder: Path) -> np.ndarray:
    """Whether each question was answered right, in the order of their rows."""
    lines = (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    found = {row["row"]: bool(row["correct"]) for row in map(json.loads, lines)}
    return np.array([found[each] for each in sorted(found)], dtype=float)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def accuracies(right: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """(accuracy, half of its 95% interval over questions) of each model, and of the mean over seeds."""
    means = {"16 bits": right[0], "rounded": right[1], "distilled": np.mean(right[2:], 0)}
    means |= {f"distilled, seed {number}": each for number, each in enumerate(right[2:])}
    return {name: [each.mean(), 1.96 * each.std(ddof=1) / len(each) ** 0.5] for name, each in means.items()}


def share_back(whole: np.ndarray, rounded: np.ndarray, distilled: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """What rounding cost, what came back and its share of the cost: (value, lower, upper bound) over questions."""
    mean = np.mean(distilled, 0)
    draws = np.random.default_rng(0).integers(len(whole), size=(DRAWS, len(whole)))
    cost, back = (each[draws].mean(1) for each in (whole - rounded, mean - rounded))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(cost > 0, back / cost, np.nan)
    bounds = [np.quantile(each, [0.025, 0.975]).tolist() for each in (cost, back)]
    known = np.isfinite(shares).mean() > 0.975  # else rounding cost nothing that could be told
    share = [back.mean() / cost.mean(), *np.nanquantile(shares, [0.025, 0.975])] if known else [None] * 3
    values = [(whole - rounded).mean(), (mean - rounded).mean()]
    named = {name: [value, *each] for name, value, each in zip(("cost", "back"), values, bounds, strict=True)}
    return {**named, "share": [None if each is None else float(each) for each in share]}


def falls(kls: Sequence[float]) -> dict[str, object]:
    """The KL of the rounded model, of each distilled one, and by what factor their mean is smaller."""
    rounded, *distilled = kls
    return {"rounded": rounded, "distilled": distilled, "falls": float(rounded / np.mean(distilled))}


def table(result: dict) -> str:
    lines = ["| model | accuracy, % |", "|---|---|"]
    lines += [
        f"| {name} | {100 * value:.1f} ± {100 * half:.1f} |" for name, (value, half) in result["accuracy"].items()
    ]
    back = result["came_back"]
    for name in ("cost", "back"):
        value, low, high = (100 * each for each in back[name])
        lines.append(f"{name}: {value:.1f} points ({low:.1f} to {high:.1f})")
    share = back["share"]
    lines.append("share: cannot be told" if share[0] is None else "share: {:.2f} ({:.2f} to {:.2f})".format(*share))
    for direction, kl in result["kl"].items():
        lines.append(f"{direction} KL: {kl['rounded']:.5f} to {np.mean(kl['distilled']):.5f}, {kl['falls']:.1f} x")
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


if __name__ == "__main__":
    main()
