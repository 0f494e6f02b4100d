"""Mistakes that tests have to see: each is made in a copy of the tree, and its tests have to fail.

    python scripts/checks/mutants.py             # all of them, one after another; survivors are printed at the end
    python scripts/checks/mutants.py teacher     # those whose file or purpose has the word

A mistake is one text of one file, which stands there once, and what stands there instead. The exit code is the number
of survivors. To see whether new code is tested, add a line to MUTANTS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "runs", "checkpoints", "benchmarks", ".*_cache", "site"
)


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` becomes `new` in `file`, and one of the tests of `test` has to fail."""

    purpose: str
    file: str
    old: str
    new: str
    test: str


COMPARE, COMPARED = "eval/compare.py", "tests/eval/test_compare.py"
TEACHER, TAUGHT = "training/policy/teacher.py", "tests/training/test_distillation.py"
MUTANTS = (
    Mutant(
        "the student's logits_scaling in the loss",
        TEACHER,
        "Pair(student, own,",
        "Pair(student._replace(temperature=self._temperature), own,",
        TAUGHT,
    ),
    Mutant("the teacher's logits_scaling", TEACHER, "self._temperature * self._divisor)", "self._temperature)", TAUGHT),
    Mutant("a teacher chooses its own experts", TEACHER, "replace(row, replay=None)", "row", TAUGHT),
    Mutant(
        "a model that is merged keeps power-of-two scales",
        "quantize/export/weights.py",
        "power_of_two_scale_of(earlier) if pow2 else None",
        "None",
        "tests/quantize/merge/test_merge.py",
    ),
    Mutant(
        "head room of static scales of activations",
        "qerl/checkpoint/source.py",
        "HEADROOM_BITS = 2",
        "HEADROOM_BITS = 0",
        "tests/quantize/test_activations.py",
    ),
    Mutant(
        "a reversed inequality",
        "qerl/data/formulas/equality.py",
        "(real is not None and real > 0)",
        "real is not None",
        "tests/qerl/data/formulas/test_equality.py",
    ),
    Mutant("the interval in the verdict", COMPARE, " or self.low <= 0 <= self.high", "", COMPARED),
    Mutant("the smallest p value", COMPARE, "(1 + beyond) / (1 + FLIPS)", "beyond / FLIPS", COMPARED),
    Mutant("runs with another top_p", COMPARE, '"temperature", "top_p",', '"temperature",', COMPARED),
    Mutant("Newcombe's correction", COMPARE, "product - count / 2", "product", COMPARED),
    Mutant(
        "new random bits at each update",
        "training/policy/rounding.py",
        "derive_seed(self._seed, updates,",
        "derive_seed(self._seed, 0,",
        "tests/training/policy/test_rounding.py",
    ),
    Mutant(
        "clip metrics of sequences are means over rows",
        "training/loss/micro_batches.py",
        'if level == "sequence" else ()',
        "if False else ()",
        "tests/training/loss/test_micro_batches.py",
    ),
    Mutant(
        "the capped share counts what is trained on",
        "training/loss/correction.py",
        "(outside.expand_as(mask) & inside)",
        "outside.expand_as(mask)",
        "tests/training/loss/test_correction.py",
    ),
    Mutant(
        "held-out conversations are not learned",
        "training/sft/rows.py",
        " if tuple(row.ids) not in known",
        "",
        "tests/training/sft/test_rows.py",
    ),
    Mutant(
        "a bias beside adapters of different scales",
        "qerl/model/lora.py",
        "return len({part.scale if part.start is None else 1.0 for part in parts}) == 1",
        "return True",
        "tests/qerl/model/test_fused_linear.py",
    ),
)


def passes(test: str, tree: Path) -> bool:
    """Whether these tests pass in `tree`."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest {test} did not run (exit code {done.returncode}):\n{done.stdout[-2000:]}")
    return done.returncode == 0


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests pass with the mistake in `tree`, which is afterwards as it was."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times: correct the line in MUTANTS"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return passes(mutant.test, tree)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """The number of survivors."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = shutil.copytree(ROOT, Path(folder) / "tree", ignore=KEPT_OUT)
        chosen = [mutant for mutant in MUTANTS if word in mutant.file or word in mutant.purpose]
        for test in dict.fromkeys(mutant.test for mutant in chosen):
            if not passes(test, tree):
                raise SystemExit(f"{test} fails as it is: a mistake would not be seen by it")
        for mutant in chosen:
            began = time.monotonic()
            alive = survives(mutant, tree)
            survivors += [mutant] if alive else []
            state = "SURVIVES" if alive else "killed"
            print(f"{state:9}{time.monotonic() - began:6.0f} s  {mutant.purpose} ({mutant.file})", flush=True)
    print(f"{len(survivors)} survive")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
