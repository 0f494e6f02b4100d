"""No library that qerl imports reports to anyone, unless QERL_TELEMETRY allows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl import TELEMETRY_OFF, disable_telemetry
from qerl.config.recipe import save_config
from tests.helpers.small_run import small_config

# Python imports this module in every process that is started with its folder on PYTHONPATH.
WATCH = """
import os, sys

def watch(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) or event == "socket.getaddrinfo":
        with open(os.environ["CONNECTIONS"], "a") as log:
            log.write(f"{event} {arguments[1:] if event == 'socket.connect' else arguments[:2]}\\n")

sys.addaudithook(watch)
"""
BOTH = """
import sys
from qerl.cli.main import main

for arguments in ({train}, {eval}):
    sys.argv = ["qerl", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
"""


def test_training_and_evaluation_connect_to_nothing(nvfp4_base, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    connections = tmp_path / "connections.txt"
    connections.touch()
    for name in ("CI", "HF_HUB_OFFLINE", *TELEMETRY_OFF):  # TRL reports nothing where CI is set
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONNECTIONS", str(connections))
    save_config(small_config(nvfp4_base, tmp_path, "noise.enabled=false", steps=1), tmp_path / "recipe.yaml")
    train = ["train", "--recipe", "recipe.yaml", "--out", "run"]
    evaluate = ["eval", "arith", "--model", "run", "--limit", "4", "--max-new-tokens", "4"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    command = [sys.executable, "-c", BOTH.format(train=train, eval=evaluate)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("run/eval/*/result.json"))
    assert connections.read_text() == ""


def test_the_watch_sees_a_connection(tmp_path, monkeypatch):
    """Without this, the test above could pass because nothing is watched."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("CONNECTIONS", str(tmp_path / "seen"))
    script = "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert "socket.connect" in (tmp_path / "seen").read_text()


def test_what_the_user_has_set_stays():
    environ = {"HF_HUB_DISABLE_TELEMETRY": "0"}
    disable_telemetry(environ)
    assert environ == {**TELEMETRY_OFF, "HF_HUB_DISABLE_TELEMETRY": "0"}


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_one_variable_allows_it(value, allowed):
    environ = {"QERL_TELEMETRY": value}
    disable_telemetry(environ)
    assert (environ == {"QERL_TELEMETRY": value}) == allowed
