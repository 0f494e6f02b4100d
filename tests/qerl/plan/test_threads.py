"""Small models are computed with one thread on a CPU, unless the user says otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.plan.threads import choose_threads

ROOT = Path(__file__).parents[3]

# A command on the embedded model, in which torch is asked as soon as it can answer.
ASKED = """
import builtins, os, sys

original = builtins.__import__

def imported(name, *rest):
    module = original(name, *rest)
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        print("threads", torch.get_num_threads(), flush=True)
        os._exit(0)
    return module

builtins.__import__ = imported
from qerl.cli.main import main
sys.argv = ["qerl", "eval", "arith", "--model", "tiny", "--limit", "2", "--max-new-tokens", "2"]
main()
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize(
    ("model", "given", "wanted"),
    [
        ("tiny", {}, {"OMP_NUM_THREADS": "1"}),
        ("tiny", {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "1"}),
        ("tiny", {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}),
        ("tiny", {"MKL_NUM_THREADS": "2"}, {"MKL_NUM_THREADS": "2"}),
        ("Qwen/Qwen2.5-0.5B-Instruct", {}, {}),
        ("someone/unknown", {}, {}),
        ("/no/such/folder", {}, {}),
    ],
)
def test_the_program_chooses_for_small_models_and_the_user_above_it(model, given, wanted):
    environ = dict(given)
    choose_threads(model, environ)
    assert environ == wanted


def test_a_host_with_a_gpu_keeps_its_threads(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, NVIDIA H200, 20000, 143771, Disabled'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {}
    choose_threads("tiny", environ)
    assert environ == {}


def test_a_command_typed_by_hand_computes_so(tmp_path):
    others = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environ = {**others, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", ASKED], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert "threads 1\n" in found.stdout, found.stderr
