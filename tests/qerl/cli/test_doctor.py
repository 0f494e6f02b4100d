"""qerl doctor compares installed and tested versions, and names what is missing with the remedy."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

import qerl.cli.doctor
from qerl.cli.doctor import Check, as_json, checks, table
from qerl.cli.main import app
from tests.helpers.http_server import serving


def is_installed():
    try:
        return bool(importlib.metadata.requires("qerl"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there


def found(what):
    (check,) = [check for check in checks() if check.what == what]
    return check


@pytest.mark.parametrize(("token", "said"), [("hf_secret", "present"), (None, "none")])
def test_a_token_for_the_hub_is_looked_for_and_never_shown(monkeypatch, tmp_path, token, said):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    check = found("hub token")
    assert (check.level, check.found.partition(":")[0]) == ("ok", said)
    assert ("hf auth login" in check.remedy) == (token is None)
    assert "secret" not in as_json(checks())


pytestmark = pytest.mark.skipif(not is_installed(), reason="the tested versions are those of the installed package")


def test_this_environment_has_the_tested_versions():
    by_name = {check.what: check for check in checks()}
    expected = {"python", "packages", "torch", "trl", "transformers", "peft", "gpu", "engine", "kernel cache"}
    assert expected | {"vllm plugin", "disk", "hub"} <= set(by_name)
    assert by_name["trl"] == Check("ok", "trl", "1.16.0")
    assert table(list(by_name.values())).row_count == len(by_name)
    assert all(check.remedy for check in by_name.values() if check.level != "ok")


@pytest.mark.parametrize(
    ("installed", "level", "remedy"), [("1.17.0", "warning", "tested with 1.16.0"), (None, "error", r"setup_env\.sh")]
)
def test_another_or_a_missing_version_is_named(monkeypatch, installed, level, remedy):
    original = qerl.cli.doctor.version

    def version(package):
        if package != "trl":
            return original(package)
        if installed is None:
            raise qerl.cli.doctor.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(qerl.cli.doctor, "version", version)
    check = found("trl")
    assert check.level == level
    assert remedy.replace("\\", "") in check.remedy


class Answer(BaseHTTPRequestHandler):
    """A hub that answers each request with `status` once `may_answer` is set."""

    status, may_answer = 200, threading.Event()

    def do_HEAD(self):
        self.may_answer.wait(60)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("status", "answers", "level", "said"),
    [(200, True, "ok", "http://"), (403, True, "ok", "http://"), (200, False, "warning", "no answer|timed out")],
)
def test_the_hub_answers_in_time_or_there_is_a_warning(monkeypatch, status, answers, level, said):
    monkeypatch.setattr(qerl.cli.doctor, "HUB_TIMEOUT_S", 60.0 if answers else 0.2)
    may_answer = threading.Event()
    handler = type("Hub", (Answer,), {"status": status, "may_answer": may_answer})
    if answers:
        may_answer.set()
    with serving(handler) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        check = found("hub")
        may_answer.set()
    assert check.level == level
    assert any(word in check.found for word in said.split("|"))


def test_a_full_disk_is_a_warning(monkeypatch):
    monkeypatch.setattr(qerl.cli.doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**30})())
    assert (found("disk").level, found("disk").found) == ("warning", "1 GiB free")


def test_an_unreachable_hub_is_a_warning_unless_offline_mode_is_set(monkeypatch):
    assert (found("hub").level, "refused" in found("hub").found) == ("warning", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found("hub").level == "ok"


def test_a_cache_folder_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "new"))
    assert found("kernel cache") == Check("ok", "kernel cache", f"{tmp_path / 'new'}: 0 kernels")
    (tmp_path / "new" / "gemm-1.cubin").touch()
    assert found("kernel cache").found.endswith(": 1 kernels")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "file" / "below"))
    check = found("kernel cache")
    assert (check.level, "QERL_CACHE" in check.remedy) == ("error", True)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert [row["what"] for row in json.loads(result.stdout) if row["level"] == "error"] == ["kernel cache"]


@pytest.mark.parametrize(("allowed", "level"), [(None, "ok"), ("other,qerl", "ok"), ("other", "error"), ("", "error")])
def test_vllm_has_to_find_the_plugin(monkeypatch, tmp_path, allowed, level):
    if importlib.util.find_spec("vllm") is None:
        (tmp_path / "vllm.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert found("vllm plugin").level == level
    monkeypatch.setattr(qerl.cli.doctor, "entry_points", lambda group: [])
    assert "no entry point" in found("vllm plugin").found


def test_a_package_of_another_project_with_the_name_of_ours_is_named_in_one_line(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "__init__.py").write_text("")
    paths = os.pathsep.join((str(tmp_path), str(Path(qerl.cli.doctor.__file__).parents[2])))
    # with an editable install the modules inside our package would still be found
    plain = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in repr(f)]; "
    command = [sys.executable, "-c", plain + "from qerl.cli.main import main; main()", "doctor"]
    env = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: package eval: found in {tmp_path / 'eval'}")
