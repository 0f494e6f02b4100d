"""For damaged files, `qerl report` and `qerl compare` print one line that says where, what, and what to do."""

import json

import pytest

from qerl.cli.main import app
from qerl.cli.terminal import run_command
from tests.helpers.report_factory import DYNAMIC, ROWS, full_run, sample, write_evaluation

METRICS, SAMPLES, WARNINGS = "run/metrics.jsonl", "run/completions/step-000004.jsonl", "run/warnings.jsonl"
GRADED, RESULT = "run/eval/after/completions.jsonl", "run/eval/after/result.json"
SAMPLING = {f"dynamic_sampling/{name}": count for name, count in DYNAMIC[0].items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = full_run(tmp_path / "run", [sample("good", 1.0), sample("bad", 0.0), sample("fair", 0.5)])
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | SAMPLING) + "\n" for row in ROWS))
    warning = {"step": 3, "kind": "no_variance", "text": "all alike"}
    (run / "warnings.jsonl").write_text((json.dumps(warning) + "\n") * 3)
    write_evaluation(run / "eval" / "before", [False, False, True, False])
    write_evaluation(run / "eval" / "after", [True, True, True, False])
    return tmp_path


def change(path, line, key, value):
    """Put `value` under a dotted key of a line, counted from 1. `...` removes the key; without a key it is the line."""
    lines = path.read_text().splitlines()
    if key is None:
        lines[line - 1] = value
    else:
        row = inner = json.loads(lines[line - 1])
        *outer, last = key.split(" ")
        for name in outer:
            inner = inner[name]
        inner.pop(last) if value is ... else inner.update({last: value})
        lines[line - 1] = json.dumps(row)
    path.write_text("".join(line + "\n" for line in lines))


def ran(capsys, command):
    """Run a command. Returns exit code and stderr."""
    with pytest.raises(SystemExit) as stopped:
        run_command(app, command.split())
    return stopped.value.code, capsys.readouterr().err


REPORT, COMPARE = "report run", "compare run/eval/before run/eval/after"
WITH = f"{REPORT} --before run/eval/before --after run/eval/after"


@pytest.mark.parametrize("command", [REPORT, WITH, COMPARE])
def test_undamaged_files_are_shown(folder, capsys, command):
    code, said = ran(capsys, command)
    assert code == 0
    assert "error" not in said


@pytest.mark.parametrize(
    ("command", "damage", "said"),
    [
        (REPORT, (METRICS, 2, None, '{"step": 2, "rew'), "no JSON: Unterminated string"),
        (REPORT, (METRICS, 2, None, "[1]"), "(a JSON list, not an object)"),
        (REPORT, (METRICS, 5, "step", None), "step is null: it should be a valid integer"),
        (REPORT, (METRICS, 5, "step", ...), "step is missing"),
        (REPORT, (METRICS, 1, "reward", "high"), 'reward is "high": it should be a valid number'),
        (REPORT, (METRICS, 1, "reward", float("nan")), "reward is NaN: it should be a finite number"),
        (REPORT, (METRICS, 3, "noise/sigma", None), "noise/sigma is null, and noise/stage is a number"),
        (REPORT, (METRICS, 3, "dynamic_sampling/filled_groups", ...), "filled_groups is missing, and dynamic_sampli"),
        (REPORT, (SAMPLES, 2, "completion", None), "completion is null: it should be text"),
        (REPORT, (SAMPLES, 2, "rewards accuracy", "1"), 'rewards.accuracy is "1": it should be a valid number'),
        (REPORT, (WARNINGS, 1, "text", ...), "text is missing"),
        (REPORT, (GRADED, 3, "correct", None), "correct is null: it should be a valid boolean"),
        (REPORT, (RESULT, 1, "accuracy low", None), "accuracy.low is null: it should be a valid number"),
        (WITH, (RESULT, 1, "truncated_share", ...), "truncated_share is missing"),
        (COMPARE, (GRADED, 3, None, '{"row": 2, "corr'), "no JSON: Unterminated string"),
        (COMPARE, (GRADED, 3, "row", ...), "row is missing"),
        (COMPARE, (RESULT, 1, "samples", "1"), 'samples is "1": it should be a valid integer'),
        (COMPARE, (RESULT, 1, "identity", ...), "identity is missing"),
    ],
)
def test_the_damage_is_named(folder, capsys, command, damage, said):
    """`damage` is the file and its line, the key there (None: the whole line), and what it is changed to."""
    file, line, key, value = damage
    change(folder / file, line, key, value)
    code, error = ran(capsys, command)
    assert code == 2
    place = f"{file} is damaged" if file == RESULT else f"line {line} of {file} is damaged"
    assert error.startswith(f"error: {place} (")
    assert said in error
    assert ": put back the file as the run wrote it, or delete" in error or ": give an evaluation whose files" in error
    assert error.count("\n") == 1


def test_answers_to_other_rows_are_not_compared(folder, capsys):
    change(folder / GRADED, 4, "row", 2)
    code, error = ran(capsys, COMPARE)
    assert code == 2
    assert "answers to other rows of the data ([3])" in error


def test_for_a_run_without_its_metrics_the_report_says_so(folder, capsys):
    (folder / METRICS).unlink()
    assert ran(capsys, REPORT) == (
        2,
        "error: run has no metrics.jsonl: put it back, or give the directory of a run that has begun\n",
    )
