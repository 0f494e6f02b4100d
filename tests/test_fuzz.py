"""Every kind of file that qerl reads, damaged at random: each ends in success or in one error for the user, within
limits of time and memory (tests/helpers/fuzz.py).

QERL_TEST_MUTATIONS sets how many files of each kind are tried, the first of them sound, and QERL_TEST_SEED which.
"""

import itertools
import json
import os

import pytest

from qerl.checkpoint.folder import seal
from qerl.checkpoint.output import list_files
from qerl.config.recipe import load_recipe, save_config
from tests.helpers.bases import write_base
from tests.helpers.eval_factory import make_adapter
from tests.helpers.fuzz import FILES, KINDS, damage
from tests.helpers.report_factory import ROWS, full_run, sample, write_evaluation
from tests.helpers.row_files import write
from tests.helpers.run_process import forked

pytestmark = pytest.mark.timeout(36000)
COUNT = int(os.environ.get("QERL_TEST_MUTATIONS", "2"))
SEED = os.environ.get("QERL_TEST_SEED", "0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A sound file of each kind."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder):
    base = write_base(folder / "model")
    make_adapter(folder / "adapter", base, random_b=True)
    run = full_run(folder / "run", [sample("good", 1.0), sample("bad", 0.0)])
    config = load_recipe("tiny", ["model.base=tiny", "model.format=bf16", "run.steps=5"])
    for file in (run / "config.yaml", folder / "recipe.yaml"):
        file.unlink(missing_ok=True)
        save_config(config, file)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (run / "warnings.jsonl").write_text(json.dumps({"step": 3, "kind": "no_variance", "text": "all alike"}) + "\n")
    for name in ("before", "after"):
        folder_of_it = write_evaluation(run / "eval" / name, [True] * 4)
        settings = {"identity": {"task": "arith"}, "engine": {"kernel": "x"}}
        (folder_of_it / "settings.json").write_text(json.dumps(settings))
    checkpoint = make_adapter(run / "checkpoints" / "step-000004", base, random_b=True)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (checkpoint / name).write_bytes(b"state")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": []}))
    seal(checkpoint)
    (folder / "written").mkdir()
    (folder / "written" / "quantize_report.json").write_text(json.dumps({"format": "x", "source": "tiny"}))
    list_files(folder / "written")
    (folder / "data").mkdir()
    rows = [{"question": f"What is {n}+1?", "answer": str(n + 1), "completion": f"#### {n}"} for n in range(5)]
    for name in FILES["rows"][2].split():
        write(folder / "data" / name, rows)
    return folder


def found(corpus, folder, kinds):
    """Findings among COUNT damaged files of each kind. A process that dies is one too; the next goes on after it."""
    first, findings = 0, []
    for attempt in itertools.count():
        progress, errors = folder / f"{attempt}.jsonl", folder / f"{attempt}.errors"
        process = forked(damage, corpus, progress, SEED, COUNT, first, kinds)
        process.join()
        lines = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
        assert lines, errors.read_text()
        findings += [line for line in lines if "finding" in line]
        if "done" in lines[-1]:
            return findings
        assert lines[-1]["job"] >= len(kinds), (lines[-1], errors.read_text())  # else the file was sound
        last = errors.read_text().strip().split("\n")[-1]
        findings.append({**lines[-1], "finding": f"the process ended with {process.exitcode}: {last}"})
        first = lines[-1]["job"] + 1


def test_damaged_files_end_in_one_error(corpus, tmp_path):
    assert found(corpus, tmp_path, list(KINDS)) == []
