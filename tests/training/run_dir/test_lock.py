"""A run directory has one writer, and a run that cannot start leaves nothing behind."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import training.run
from qerl.base.errors import ConfigError, EngineError
from qerl.config.recipe import save_config
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
    assert not (run_dir / "metrics.jsonl").exists()
    process.kill()
    process.communicate()
    with only_writer(run_dir, ["config.yaml"]):
        pass


def test_two_runs_that_begin_at_once_do_not_share_a_directory(tmp_path):
    found = written(tmp_path / "run")
    with only_writer(tmp_path / "run", found):
        (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="another process writes to"), only_writer(tmp_path / "run", found):
        pass


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_directory_that_cannot_be_made_gives_one_error(nvfp4_base, tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"is a file; give another --out|already exists"):
        start(small_config(nvfp4_base, tmp_path, out=place), "tiny")


@pytest.fixture
def no_engine(monkeypatch):
    monkeypatch.setattr(training.run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))


def test_an_optimizer_that_this_machine_lacks_is_refused_before_an_engine_is_opened(
    nvfp4_base, tmp_path, monkeypatch, no_engine
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineError, match=r"optim\.name is adamw_8bit"):
        start(small_config(nvfp4_base, tmp_path, "optim.name=adamw_8bit"), "tiny")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused_before_an_engine_is_opened(
    nvfp4_base, tmp_path, monkeypatch, no_engine, tracker
):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == tracker else find(name, *more))
    with pytest.raises(ConfigError, match=f"names {tracker}, which is not installed: run `pip install {tracker}`"):
        start(small_config(nvfp4_base, tmp_path, f"logging.report_to=[{tracker}]"), "tiny")
    assert not (tmp_path / "run").exists()
