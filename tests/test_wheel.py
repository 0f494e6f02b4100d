"""The wheel that a user installs: its version, what it holds, and its commands in an environment of its own."""

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import qerl
from quantize.calibration import shipped_rows

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for name in ("qerl", "quantize", "training", "eval"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


def test_the_version_is_that_of_the_wheel_the_changelog_and_the_tag(wheel):
    sections = re.findall(r"^## (\d[\d.]*) \(", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (wheel.name.split("-")[1], sections[0]) == (qerl.__version__, qerl.__version__)
    git = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    assert tags in ([], [f"v{qerl.__version__}"])


def test_it_holds_the_rows_and_their_licences(wheel):
    with zipfile.ZipFile(wheel) as file:
        assert file.read("quantize/rows/mixed.jsonl.gz") == shipped_rows().read_bytes()
        texts = file.read("quantize/rows/LICENSES").decode()
        assert any(name.endswith("licenses/quantize/rows/LICENSES") for name in file.namelist())
    for part in ("MIT License", "Copyright (c) 2021 OpenAI", "TERMS AND CONDITIONS FOR USE", "Bytedance"):
        assert part in texts
    assert {kind for kind in ("gsm8k", "dapo_math", "docs") if f'kind "{kind}"' in texts} == {
        "gsm8k", "dapo_math", "docs",
    }  # fmt: skip


@pytest.mark.timeout(900)  # five processes that import qerl, one of them torch: 40 s of a core
def test_it_trains_where_nothing_else_of_qerl_is(wheel, tmp_path):
    """The environment is fresh but for the libraries that qerl needs, which are those of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    own = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # of which the .pth files are not read

    alone = {"PATH": "", "OMP_NUM_THREADS": "1"}

    def said(*words):
        command = [tmp_path / "env" / "bin" / "qerl", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    assert said("--version").startswith(f"qerl {qerl.__version__}\n")
    assert {path.stem for path in (ROOT / "training" / "recipes").glob("*.yaml")} <= set(said("recipes").split())
    assert said("plan", "--recipe", "tiny", "--gpu", "24").startswith("Fits ")
    small = (
        "model.format=bf16",
        "noise.enabled=false",
        "data.limit=16",
        "rollout.prompts_per_step=1",
        "rollout.group_size=2",
        "rollout.max_new_tokens=4",
    )
    settings = [word for setting in small for word in ("--set", setting)]
    said("train", "--recipe", "tiny", "--steps", "1", "--out", "run", *settings)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
