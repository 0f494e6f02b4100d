"""qerl doctor: what is installed against what was tested, and what is missing named with its remedy."""

import importlib.metadata

import pytest

import qerl.doctor
from qerl.doctor import checks, table


def is_installed():
    try:
        return bool(importlib.metadata.requires("qerl"))
    except importlib.metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_installed(), reason="the tested versions are those of the installed package")


def test_this_environment_is_the_tested_one():
    found = {check.what: check for check in checks()}
    assert {"python", "torch", "trl", "transformers", "peft", "gpu", "engine", "disk"} <= set(found)
    assert found["trl"].level == "ok"
    assert found["trl"].found == "1.16.0"
    assert table(list(found.values())).row_count == len(found)


@pytest.mark.parametrize(
    ("installed", "level", "remedy"),
    [("1.17.0", "warning", "tested with 1.16.0"), (None, "error", r"setup_env\.sh")],
)
def test_another_or_a_missing_version_is_named(monkeypatch, installed, level, remedy):
    original = qerl.doctor.version

    def version(package):
        if package != "trl":
            return original(package)
        if installed is None:
            raise qerl.doctor.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(qerl.doctor, "version", version)
    (check,) = [check for check in checks() if check.what == "trl"]
    assert check.level == level
    assert remedy.replace("\\", "") in check.remedy


def test_a_full_disk_is_a_warning(monkeypatch):
    monkeypatch.setattr(qerl.doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**30})())
    (check,) = [check for check in checks() if check.what == "disk"]
    assert (check.level, check.found) == ("warning", "1 GiB free")
