"""Which Python setup_env.sh takes, and what it installs, with Pythons that only write down how they are called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Answers as an interpreter of some version; `-m venv DIR` puts the same interpreter there.
PYTHON = """\
#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
    --version) echo "Python {version}" ;;
    "-c import sys;"*) [ {minor} -ge 11 ] && [ {minor} -le 13 ] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$(type -P true)" "$3/bin/qerl" ;;
    "-m uv --version") echo "uv {uv}" ;;
    "-m uv venv "*) [ -n "$FETCHED" ] && cp -r "$FETCHED" .venv ;;
    *"--dry-run"*) [ -z "$NO_CPU_TORCH" ] ;;
esac
"""


class Machine:
    """A copy of the script and of what it reads, with only the programs on the PATH that a test puts there."""

    def __init__(self, folder):
        self.folder, self.log, self.programs = folder / "qerl", folder / "log", folder / "bin"
        self.folder.mkdir()
        self.programs.mkdir()
        for name in ("setup_env.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        for name in ("bash", "basename", "cat", "cksum", "cp", "dirname", "mkdir", "mktemp", "rm", "sed", "true"):
            (self.programs / name).symlink_to(shutil.which(name))

    def program(self, name, text):
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name, version, uv="9.9.9"):
        return self.program(name, PYTHON.format(version=version, minor=version.split(".")[1], uv=uv))

    def run(self, **environment):
        self.log.write_text("")
        return subprocess.run(
            [shutil.which("bash"), "setup_env.sh"],
            cwd=self.folder,
            env={"PATH": str(self.programs), "LOG": str(self.log), "QERL_DEVICE": "cpu", **environment},
            capture_output=True,
            text=True,
        )

    def calls(self, part):
        return [line for line in self.log.read_text().splitlines() if part in line]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.12.4", "python3.11": "3.11.9"}, "Python 3.12.4"),
        ({"python3": "3.14.0", "python3.11": "3.11.2"}, "Python 3.11.2"),
        ({"python3": "3.9.2", "python3.13": "3.13.0"}, "Python 3.13.0"),
    ],
)
def test_the_first_python_that_fits_is_taken(machine, pythons, taken):
    for name, version in pythons.items():
        machine.python(name, version)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert f"without a GPU ({taken})" in done.stdout
    assert taken in (machine.folder / ".venv" / ".qerl-setup").read_text()


def test_the_python_that_was_asked_for_is_taken_or_refused(machine):
    machine.python("python3", "3.12.4")
    machine.python("mine", "3.13.1")
    machine.python("python3.14", "3.14.0")
    assert "(Python 3.13.1)" in machine.run(PYTHON="mine").stdout
    refused = [machine.run(PYTHON=name) for name in ("python3.14", "nowhere")]
    assert [(done.returncode, done.stderr) for done in refused] == [
        (1, "setup_env.sh: python3.14 is Python 3.14.0: install Python 3.11 to 3.13, or set PYTHON to one\n"),
        (1, "setup_env.sh: nowhere was not found: install Python 3.11 to 3.13, or set PYTHON to one\n"),
    ]


@pytest.mark.parametrize("uv_is_here", [True, False])
def test_uv_fetches_a_python_where_none_fits(machine, tmp_path, uv_is_here):
    """uv itself is the one on the PATH, or one that the Python which does not fit can install."""
    fetched = tmp_path / "fetched"
    (fetched / "bin").mkdir(parents=True)
    shutil.copy(machine.python("uvpython", "3.12.7"), fetched / "bin" / "python")
    shutil.copy(shutil.which("true"), fetched / "bin" / "qerl")
    machine.python("python3", "3.14.0")
    if uv_is_here:
        machine.program("uv", '#!/bin/sh\necho "uv $*" >>"$LOG"\ncp -r "$FETCHED" .venv\n')
    done = machine.run(FETCHED=str(fetched))
    assert done.returncode == 0, done.stderr
    assert "python3 is Python 3.14.0, so uv fetches Python 3.12" in done.stdout
    assert machine.calls("venv --quiet --seed --managed-python --python 3.12 .venv") != []
    assert "Python 3.12.7" in (machine.folder / ".venv" / ".qerl-setup").read_text()
    again = machine.run(FETCHED=str(fetched))  # takes the Python that it fetched the first time
    assert "is up to date (cpu)" in again.stdout


def test_without_any_way_to_a_python_one_line_says_so(machine):
    machine.python("python3", "3.14.0")
    done = machine.run(FETCHED="")
    assert done.returncode == 1
    assert done.stderr == (
        "setup_env.sh: no Python 3.11 to 3.13 is here (python3 is Python 3.14.0), and uv could not fetch one: install "
        "python3.12, or set PYTHON to one\n"
    )
    assert not (machine.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("device", "files"),
    [("cpu", "-r requirements/torch-cpu.txt -r requirements/cpu.txt"), ("gpu", "-r requirements/gpu.txt")],
)
def test_the_locked_packages_are_installed_by_hash_and_shown(machine, device, files):
    machine.python("python3", "3.12.4")
    done = machine.run(QERL_DEVICE=device)
    assert done.returncode == 0, done.stderr
    installs = machine.calls("uv pip install")
    assert f"python -m uv pip install --python .venv/bin/python --no-deps --require-hashes {files}" in installs
    assert installs[-1].endswith("--quiet --no-build-isolation --editable .")
    assert machine.calls("pip install --quiet --require-hashes -r requirements/uv.txt") != []  # 9.9.9 is another uv


def test_torch_comes_from_pytorch_s_index_where_the_configured_sources_have_no_cpu_build(machine):
    machine.python("python3", "3.12.4")
    assert machine.run(NO_CPU_TORCH="1").returncode == 0
    assert machine.calls("--no-deps --torch-backend=cpu --require-hashes -r requirements/torch-cpu.txt") != []


def test_a_change_of_the_lock_is_installed(machine):
    machine.python("python3", "3.12.4")
    assert machine.run().returncode == 0
    assert "up to date" in machine.run().stdout
    with (machine.folder / "requirements" / "cpu.txt").open("a") as lock:
        lock.write("# changed\n")
    assert "installing the packages" in machine.run().stdout


def test_an_environment_of_another_python_is_made_anew(machine):
    machine.python("python3", "3.12.4")
    assert machine.run().returncode == 0
    machine.python("python3", "3.12.5")
    assert "(Python 3.12.5)" in machine.run().stdout
    assert os.access(machine.folder / ".venv" / "bin" / "python", os.X_OK)
    assert machine.calls("-m venv .venv") != []
