"""The Dockerfile names what is there, and the script for Slurm begins, continues and queues a run again."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "anywhere.md").read_text(encoding="utf-8")


def test_the_dockerfile_names_stages_and_files_that_are_there():
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    named = [name for _, name in stages]
    assert set(re.findall(r"--target (\w+)", DOCKERFILE + PAGE)) == {"cpu", "gpu"} <= set(named)
    assert [base for base, _ in stages if base not in named] == ["python:${PYTHON}-slim"]
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    required = re.findall(r"-r (\S+)", DOCKERFILE)
    assert all((ROOT / name).exists() for name in copied)
    assert set(required) <= set(copied)
    python = re.search(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE)[1]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == ">=3.11,<3.14"
    assert python in ("3.11", "3.12", "3.13")


@pytest.mark.parametrize(("begun", "code", "requeued"), [(False, 143, True), (True, 143, True), (True, 0, False)])
def test_the_script_for_slurm(begun, code, requeued, tmp_path):
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)[1]
    for name, exits in (("srun", code), ("scontrol", 0)):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/bash\necho "{name} $*"\nexit {exits}\n')
        stub.chmod(0o755)
    if begun:
        (tmp_path / "runs" / "qerl").mkdir(parents=True)
        (tmp_path / "runs" / "qerl" / "config.yaml").touch()
    given = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "qerl", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=given, capture_output=True, text=True)
    first = "--resume runs/qerl" if begun else "--recipe dapo_7b --quantize --out runs/qerl"
    expected = [f"srun qerl train {first}", *(["scontrol requeue 7"] if requeued else [])]
    assert (done.stdout.splitlines(), done.returncode) == (expected, code)
