"""Checkpoints with 4-bit activations on the vllm engine: it rounds them, and does not open if it would not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNROUNDED = """
import sys
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.engine import VLLMEngine
from qerl.engine.vllm import opening
opening.import_vllm()
from qerl.engine.vllm.linear import Base
Base.input = lambda self, x: x.contiguous()
VLLMEngine(sys.argv[1], "nvfp4", EngineOptions(max_context=256, cap_gib=8))
"""

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def script(name, *arguments):
    """(exit code, what was printed) of a script, or of a program where `name` is -c."""
    place = [name] if name == "-c" else [str(next((ROOT / "scripts").glob(f"*/{name}")))]
    command = [sys.executable, *place, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["static", "dynamic"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / request.param
    code, text = script(
        "make_random_checkpoint.py", "--shape", "tiny-qwen2", "--out", folder, "--activations", request.param
    )
    assert code == 0, text
    return folder


def test_sampler_trainer_and_vllms_emulation_agree_and_weight_only_serving_does_not(model, tmp_path):
    out, stock = tmp_path / "report.json", model.name == "static"
    given = ["--model", model, "--out", out, "--memory-gib", 8, *["--no-stock"] * (not stock)]
    code, text = script("check_w4a4.py", *given)
    assert code == 0, text[-3000:]
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["kernel"].endswith(f", {model.name} 4-bit activations")
    far = report["from_sampled"]
    assert far["score"]["kl"] < 0.003
    assert far["trainer"]["kl"] < 0.003
    if stock:
        assert far["emulation"]["kl"] < 0.25 * far["stock"]["kl"]
        assert far["stock"]["kl"] > 10 * far["trainer"]["kl"]


def test_an_engine_that_would_serve_16_bit_activations_does_not_open(model):
    code, text = script("-c", UNROUNDED, model)
    assert code != 0
    assert "does not compute with activations in 4 bits" in text
