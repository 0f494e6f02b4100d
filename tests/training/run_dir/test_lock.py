"""A run directory has one writer, and a run that cannot start leaves nothing behind."""

import fcntl
import importlib.util
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import qerl
import training.run
from qerl.base.errors import CheckpointError, ConfigError, DataError, EngineError
from qerl.config.recipe import save_config
from qerl.report.read import state_of
from tests.helpers.model_folders import edited
from tests.helpers.small_run import small_config
from training.run import resume, start
from training.run_dir.folder import only_writer, written

HOLD = """
import sys
from pathlib import Path
from training.run_dir.folder import only_writer, written
with only_writer(Path(sys.argv[1]), []):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(run_dir):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_held_by_another_process_is_refused_until_that_one_is_killed(nvfp4_base, tmp_path):
    run_dir = tmp_path / "run"
    process = holder(run_dir)
    save_config(small_config(nvfp4_base, tmp_path), run_dir / "config.yaml")
    with pytest.raises(ConfigError, match="another process writes to"):
        resume(run_dir)
    assert state_of(run_dir) == "running"
    assert not (run_dir / "metrics.jsonl").exists()
    process.kill()
    process.communicate()
    assert state_of(run_dir) == "killed"
    with only_writer(run_dir, ["config.yaml"]):
        pass
    assert state_of(run_dir) == "stopped"


def test_whether_a_run_of_another_host_still_runs_is_not_known(tmp_path):
    for said, state in ("running", "killed"), (f"running {socket.gethostname()}", "killed"), ("running gpu7", "gpu7"):
        (tmp_path / ".lock").write_text(said)
        assert state_of(tmp_path) in (state, f"not known: it began on {state}")


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (EngineError("no room\nat all"), "failed: no room at all"),
        (AssertionError(), "failed: AssertionError"),
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(143), "stopped"),
    ],
)
def test_a_run_says_how_it_ended(tmp_path, error, state):
    with pytest.raises(type(error)), only_writer(tmp_path / "run", []):
        raise error
    assert state_of(tmp_path / "run") == state
    (tmp_path / "run" / "adapter").mkdir()
    assert state_of(tmp_path / "run") == "finished"
    with only_writer(tmp_path / "run", []):
        pass
    (tmp_path / "run" / "adapter").rmdir()  # by a user, to save space
    assert state_of(tmp_path / "run") == "finished"


@pytest.mark.parametrize("error", [ConfigError("a"), CheckpointError("b"), DataError("c")])
@pytest.mark.parametrize("there", [None, "", ".lock", "base"])
def test_what_is_refused_before_anything_is_written_leaves_nothing(tmp_path, error, there):
    run_dir = tmp_path / "run"
    if there is not None:
        run_dir.mkdir()
    if there:
        (run_dir / there).touch()
    with pytest.raises(type(error)), only_writer(run_dir, []):
        raise error
    assert run_dir.exists() == (there is not None)
    assert [path.name for path in run_dir.glob("*")] == ([".lock", "base"] if there == "base" else [])


def test_a_lock_that_a_refused_run_takes_away_is_no_lock(tmp_path, monkeypatch):
    """The other process has opened the file, and gets its lock when the file is gone."""
    lock = fcntl.lockf

    def late(handle, how):
        (tmp_path / "run" / ".lock").unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with pytest.raises(ConfigError, match="another process writes to"), only_writer(tmp_path / "run", []):
        pass


def test_a_base_that_cannot_be_opened_leaves_no_run(base, tmp_path):
    folder = edited(shutil.copytree(base, tmp_path / "other"), intermediate_size=16)
    with pytest.raises(CheckpointError, match=r"does not hold the model that its config.json describes"):
        start(small_config(folder, tmp_path, "model.format=bf16"), "tiny")
    assert not (tmp_path / "run").exists()


SEEN_FROM_OUTSIDE = """
import sys
from pathlib import Path
from qerl.report.read import state_of
print(state_of(Path(sys.argv[1])))
"""


def test_a_run_that_is_being_opened_is_running_and_says_why_it_failed_there(nvfp4_base, tmp_path, monkeypatch):
    run_dir, seen = tmp_path / "run", []

    def too_large(*_):
        seen.append(subprocess.check_output([sys.executable, "-c", SEEN_FROM_OUTSIDE, str(run_dir)], text=True).strip())
        raise EngineError("out of memory")

    monkeypatch.setattr(training.run, "open_rollout_engine", too_large)
    for _ in range(2):  # what it leaves does not block the next try
        with pytest.raises(EngineError):
            start(small_config(nvfp4_base, tmp_path), "tiny")
    assert (seen, state_of(run_dir)) == (["running"] * 2, "failed: out of memory")


def test_whoever_asks_in_the_process_of_a_run_leaves_its_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with only_writer(tmp_path / "run", []):
        assert [run.state for run in (*qerl.runs("."), *qerl.runs(tmp_path / "run"))] == ["running"] * 2
        seen = subprocess.check_output([sys.executable, "-c", SEEN_FROM_OUTSIDE, str(tmp_path / "run")], text=True)
    assert (seen, state_of(tmp_path / "run")) == ("running\n", "stopped")


def test_two_runs_that_begin_at_once_do_not_share_a_directory(tmp_path):
    found = written(tmp_path / "run")
    with only_writer(tmp_path / "run", found):
        (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="another process writes to"), only_writer(tmp_path / "run", found):
        pass


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optim.name=adamw_8bit", r"optim\.name is adamw_8bit"),
        ("logging.report_to=[trackio]", "names trackio, which is not installed: run `pip install trackio`"),
        ("logging.report_to=[mlflow]", "names mlflow, which is not installed: run `pip install mlflow`"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_an_engine_is_opened(
    nvfp4_base, tmp_path, monkeypatch, setting, said
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name in ("trackio", "mlflow") else find(name, *more)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(training.run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))
    with pytest.raises((ConfigError, EngineError), match=said):
        start(small_config(nvfp4_base, tmp_path, setting), "tiny")
    assert not (tmp_path / "run").exists()
