"""A mixture of experts in the vllm engine on a card: scripts/checks/check_experts.py on small models.

The oracles are the checkpoint's own decoding, the routers' inputs, and the trainer's products. Last run on an H200 on
2026-11-27. A repeated call does not give the same bits: with `--deterministic` one of eight completions differed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

CASES = [
    ("nvfp4", "shared"),
    ("nvfp4", "per_expert"),
    ("bf16", "shared"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def checked(request, tmp_path_factory):
    """The report of a process of its own, which can have one engine."""
    format, kind = request.param
    folder = tmp_path_factory.mktemp(f"{format}-{kind}")
    model, out = folder / "model", folder / "report.json"
    run("models/make_random_checkpoint.py", "--shape", "small-qwen3-moe", "--format", format, "--out", model)
    run("checks/check_experts.py", "--model", model, "--format", format, "--experts", kind, "--out", out)
    return SimpleNamespace(format=format, **json.loads(out.read_text(encoding="utf-8")))


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_experts_have_their_kernel_and_the_checkpoints_bits_which_the_trainer_reads(checked):
    assert checked.kernel.endswith(" + marlin (experts)" if checked.format == "nvfp4" else " + triton (experts)")
    assert checked.drawn_by == "FusedSampler"
    assert checked.one_copy["foreign"] == []
    assert checked.one_copy["experts"] == 4
    assert checked.decoded["count"] == 0


def test_what_is_recorded_is_what_the_routers_chose(checked):
    assert checked.routers["shape"] == [700, 2, 4]
    assert checked.routers["layers_seen"] == 2
    assert checked.routers["unrecorded"] == 0
    assert checked.routers["largest_gap"] < 1e-2
    assert all(checked.cached_prompts["equal"])
    assert not any(checked.cached_prompts["rows_missing"])


def test_the_sampler_agrees_with_the_trainer_that_replays_its_experts(checked):
    for result in (checked.replayed, checked.adapter):
        assert result["with_replay"]["kl"] < 5e-4
        assert result["with_replay"]["kl"] <= 1.2 * result["without_replay"]["kl"]


def test_an_adapter_acts_on_experts_and_zeros_take_it_back(checked):
    assert checked.adapter["on_experts"] == 8
    assert checked.adapter["changed"] > 0
    assert checked.adapter["changed_by_experts"] == 8
