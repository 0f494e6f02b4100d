"""`qerl --version`, and `qerl plan` without a recipe."""

import subprocess
import sys
from pathlib import Path

import qerl

ROOT = Path(__file__).parents[3]


def test_the_version_names_the_stack_without_loading_it():
    script = "import sys; from qerl.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, cwd=ROOT)
    lines = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    assert found.returncode == 0, found.stderr
    assert lines["qerl"] == qerl.__version__
    assert lines["torch"][0].isdigit()
    assert "vllm" in lines


def test_a_plan_of_a_model_alone_says_which_recipe_it_takes(here):
    code, stdout, stderr = here("plan", "--model", "Qwen/Qwen2.5-3B-Instruct", "--gpu", "24")
    assert code == 0, stderr
    assert "no --recipe given: planning with dapo_7b" in stderr
    assert "seconds per step" in stdout
