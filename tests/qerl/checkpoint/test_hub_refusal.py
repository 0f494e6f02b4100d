"""Gated, private and missing models and data sets: a server on this machine answers as the hub does."""

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Prints the error of each function, name and token that it is given, one a line.
ASK = """\
import os, sys
from qerl.checkpoint.hub import config_folder, download_model
from qerl.data.rows import hub_rows
from qerl.base.errors import QerlError

CALLS = {"config": config_folder, "model": download_model, "rows": lambda name: hub_rows(name, None, "train")}
for word in sys.argv[1:]:
    what, name, token = word.split("=")
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        CALLS[what](name)
    except QerlError as error:
        print(error)
"""
ASKED = (
    *("config=meta/gated=", "rows=meta/gated=", "config=meta/gated=hf_reader", "model=meta/gated=hf_reader"),
    *("config=org/private=", "rows=org/private=", "config=org/private=hf_reader", "config=org/public=hf_wrong"),
)


class Hub(BaseHTTPRequestHandler):
    """`meta/gated` is gated, and everything else is private or missing; the token `hf_wrong` is none of the hub's."""

    def answer(self):
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token == "hf_wrong":
            status, headers = 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        elif "meta/gated" in self.path:
            status, headers = (403 if token else 401), {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}
        elif token:
            status, headers = 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        else:
            status, headers = 401, {"X-Error-Message": "Invalid username or password."}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What is said to each question, by one process that has only this hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    given = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    given |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", ASK, *ASKED], env={**kept, **given}, capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert not re.search("hf_reader|hf_wrong", done.stdout + done.stderr)
    return dict(zip(ASKED, done.stdout.splitlines(), strict=True))


def test_a_gated_model_names_its_licence_and_how_to_log_in(said):
    gated, rows = said["config=meta/gated="], said["rows=meta/gated="]
    assert gated == (
        "meta/gated is no folder here, and meta/gated is gated: accept its licence at "
        "https://huggingface.co/meta/gated, then log in with `hf auth login` (or set HF_TOKEN); or give a "
        "folder with the model"
    )
    assert "meta/gated is gated: accept its licence at https://huggingface.co/datasets/meta/gated, then log" in rows
    assert "--data FILE" in rows
    for question in ("config=meta/gated=hf_reader", "model=meta/gated=hf_reader"):
        assert "(or set HF_TOKEN); the token that is set here has no access yet; or give a folder" in said[question]


def test_a_private_model_looks_like_a_missing_one_and_both_are_named(said):
    without, rows = said["config=org/private="], said["rows=org/private="]
    assert "the hub shows no model org/private without a token: check the name at https://huggingface.co/" in without
    assert "if it is private, log in with `hf auth login` (or set HF_TOKEN) as someone who may read it" in without
    assert rows.startswith("the hub shows no data set org/private without a token: check the name at https://hugging")
    with_token = said["config=org/private=hf_reader"]
    assert "the hub shows no model org/private to the token that is set here: check the name" in with_token


def test_a_token_that_the_hub_does_not_know_is_named(said):
    refused = said["config=org/public=hf_wrong"]
    assert "the hub refuses org/public (401) to the token that is set here: see https://huggingface.co/org/" in refused
    assert "log in anew with `hf auth login`" in refused
