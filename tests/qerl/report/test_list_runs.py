"""`qerl runs`, and the short names by which commands find a run."""

import json
import os

import pytest

import qerl
from qerl.base.errors import ConfigError
from qerl.checkpoint.folder import run_folder, run_named
from qerl.cli.evaluate import evaluation_of
from qerl.report.read import LOCK, list_runs
from tests.helpers.report_factory import CONFIG, full_run, write_evaluation, write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Whole, damaged and partly written runs, the oldest first, and a folder that is no run."""
    monkeypatch.chdir(tmp_path)
    full_run(tmp_path / "runs/whole")
    (tmp_path / "runs/whole/adapter").mkdir()
    write_run(full_run(tmp_path / "runs/taught", config={**CONFIG, "sft": {}, "qat": {}}), [{"step": 3, "nll": 1.25}])
    (tmp_path / "runs/taught" / LOCK).write_text("failed: no room")
    torn = full_run(tmp_path / "runs/torn")
    (torn / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2}\nnonsense\n{"step": 4, "rew')
    (torn / "config.yaml").write_text("run: [")
    (write_run(tmp_path / "runs/begun", []) / LOCK).write_text("running")
    (tmp_path / "runs/notes").mkdir()
    for age, name in enumerate(("begun", "torn", "taught", "whole")):
        for file in (tmp_path / "runs" / name).iterdir():
            os.utime(file, (10**9 - age, 10**9 - age))
    return tmp_path / "runs"


def test_every_run_has_a_line_the_newest_first(here, runs):
    code, shown, _ = here("runs", "--json")
    keys = ("folder", "model", "kind", "steps", "steps_in_all", "measure", "value", "state")
    found = json.loads(shown)
    assert (code, [tuple(run[key] for key in keys) for run in found]) == (0, [
        ("runs/begun", "", "", 0, None, "", None, "killed"),
        ("runs/torn", "", "", 2, None, "reward", 0.5, "not finished"),
        ("runs/taught", "tiny", "SFT, QAT", 3, 5, "loss", 1.25, "failed"),
        ("runs/whole", "tiny", "RL", 5, 5, "reward", 0.4, "finished"),
    ])  # fmt: skip
    notes = [run["note"] for run in found]
    assert (notes[0], notes[2:]) == ("no config.yaml", ["no room", ""])
    assert notes[1].startswith("config.yaml cannot be read (")
    assert notes[1].endswith("; 1 damaged lines in metrics.jsonl")
    code, shown, _ = here("runs")
    assert (code, shown.count("runs/torn: config.yaml"), "runs/whole:" in shown) == (0, 1, False)
    same = qerl.runs()
    assert ([str(run.folder) for run in same], qerl.Run(same[3]).steps) == ([run["folder"] for run in found], 5)
    assert repr(same) == "\n".join(map(str.rstrip, shown.splitlines())).strip("\n")
    assert ([run.steps for run in qerl.runs("whole")], qerl.Run("who").steps) == ([5], 5)
    write_run(runs / "whole", [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}, {"step": 3, "entropy": 1.0}])
    (run,) = list_runs(runs / "whole")
    assert (run.steps, run.measure, run.value, run.note) == (3, "reward", None, "reward was not finite at step 2")
    assert "reward nan" in here("runs")[1]


def test_a_run_that_is_deleted_meanwhile_does_not_cut_the_list_short(runs, monkeypatch):
    remove = lambda folder: [file.unlink() for file in folder.iterdir() if file.is_file()]  # noqa: E731
    monkeypatch.setattr("qerl.report.read.state_of", lambda run: "" if run.name != "torn" else str(remove(run)))
    assert {run.folder.name for run in list_runs(runs)} == {"whole", "taught", "torn", "begun"}


@pytest.mark.parametrize(("folder", "said"), [("rnus", "did you mean runs"), ("runs/notes", "holds no run")])
def test_a_folder_without_runs_is_refused(here, runs, folder, said):
    code, _, errors = here("runs", folder)
    assert (code, said in errors) == (2, True)


def test_a_run_is_found_by_its_name_or_a_beginning(runs):
    (runs / "taut-notes").mkdir()  # no run
    names = {"whole": "runs/whole", "who": "runs/whole", "who/adapter": "runs/whole/adapter", "tor/x": "tor/x"}
    names |= {"w": "w", "wh": "wh", "tau": "runs/taught", "tiny": "tiny", "Qwen/Qwen3-4B": "Qwen/Qwen3-4B"}
    names |= {"runs/torn": "runs/torn", "": "", "./w": "./w"}
    assert {ref: run_named(ref) for ref in names} == names
    assert str(run_folder("whole")) == "runs/whole"
    write_run(runs / "torn-2", [])
    with pytest.raises(ConfigError, match="tor begins the names of several runs: write runs/torn or runs/torn-2"):
        run_named("tor")
    assert run_named("torn") == "runs/torn"  # a whole name is meant before a beginning
    write_run(runs / "tiny-1", [])
    assert (str(run_folder("tiny")), run_named("tiny")) == ("runs/tiny-1", "tiny")  # the model, where one is meant
    (runs.parent / "torn").mkdir()
    assert (run_named("torn"), str(run_folder("torn"))) == ("torn", "runs/torn")  # no run is there


def test_commands_take_short_names(here, runs):
    code, _, errors = here("report", "who")
    assert (code, (runs / "whole/report.html").is_file()) == (0, True), errors
    write_run(runs / "torn-2", [])
    several = "tor"
    for words in (["report"], ["compare", "whole"], ["train", "--resume"], ["chat", "--model"], ["plan", "--model"]):
        command = [*words, several]
        code, _, errors = here(*command)
        assert code == 2
        assert "begins the names of several runs" in errors
    write_evaluation(runs / "whole/eval/one", [True])
    assert str(evaluation_of("who")) == "runs/whole/eval/one"
    code, _, errors = here("report", "who", "--before", "whole", "--after", "who")
    assert (code, "held-out accuracy went" in (runs / "whole/report.md").read_text()) == (0, True), errors
    write_evaluation(runs / "whole/eval/two", [True])
    with pytest.raises(ConfigError, match="has several evaluations: write runs/whole/eval/one or runs/whole/eval/two"):
        evaluation_of("who")
