"""What cannot work is said before the libraries that take long are loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.load import check_chat_template
from qerl.checkpoint.resolve import resolve_model

ROOT = Path(__file__).resolve().parents[3]
# Runs the command line and says whether torch or transformers was imported for it.
RUN = """\
import sys
from qerl.cli.main import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.fixture
def without_template(tmp_path):
    """The embedded model as a base version of it would be: with a tokenizer and without a chat template."""
    folder = Path(shutil.copytree(TINY_FOLDER, tmp_path / "base"))
    for file in folder.glob("*chat_template*"):
        file.unlink()
    config = folder / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
    config.write_text(json.dumps(kept))
    return folder


def qerl(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_template_may_stand_in_the_config_or_beside_it(without_template):
    with pytest.raises(CheckpointError, match=r"base has no chat template.*or put a chat_template\.jinja into"):
        check_chat_template(resolve_model(str(without_template)))
    (without_template / "chat_template.jinja").write_text("{{ messages }}")
    check_chat_template(resolve_model(str(without_template)))
    (without_template / "chat_template.jinja").unlink()
    config = without_template / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "{{ messages }}"}))
    check_chat_template(resolve_model(str(without_template)))
    config.unlink()
    check_chat_template(resolve_model(str(without_template)))  # a missing tokenizer is named by who loads it
    check_chat_template(resolve_model("tiny"))


@pytest.mark.parametrize(
    "command",
    ["train --recipe tiny --set model.format=bf16 --model base", "eval arith --model base", "chat --model base"],
)
def test_a_missing_template_is_said_before_anything_is_loaded(without_template, command):
    done = qerl(without_template.parent, *command.split())
    assert done.returncode == 2
    assert "the tokenizer in base has no chat template" in done.stderr
    assert "loading" not in done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    "command",
    ["train --recipe tiny --set model.format=bf16 --set rollout.engine=vllm", "eval arith --model tiny --engine vllm"],
)
def test_vllm_without_a_driver_is_refused_before_anything_is_loaded(tmp_path, command):
    done = qerl(tmp_path, *command.split())
    assert done.returncode == 2
    assert "is vllm, but there is no CUDA device here: write" in done.stderr
    assert done.stdout == "[]\n"
