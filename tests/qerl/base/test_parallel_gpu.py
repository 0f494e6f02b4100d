"""Sums between two cards, by NCCL. Last passed on H200s on 2026-11-26."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

PROGRAM = """
import torch
from qerl.base.parallel import open_parallel
with open_parallel() as parallel:
    torch.cuda.set_device(parallel.local_rank)
    values = torch.full((1000,), parallel.rank + 1.0, device="cuda")
    parallel.sum_(values)
    parallel.barrier()
    print(f"{values.unique().tolist()}\\n", end="", flush=True)
"""


def test_tensors_on_two_cards_are_summed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [*command, str(tmp_path / "program.py")], env=environ, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[3.0]", "[3.0]"]
