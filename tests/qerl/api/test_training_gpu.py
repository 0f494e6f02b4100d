"""Runs after one another in one process on a card: each opens vLLM's engine anew, and gives the memory back.

It passed on an H200 on 2026-11-24. On a CPU, with the other engine:

    QERL_TEST_ENGINE=transformers python -m pytest -n0 -m gpu tests/qerl/api/test_training_gpu.py
"""

import gc
import os

import pytest
import torch

import qerl
from tests.helpers.small_run import numbers, same_adapters

ENGINE = os.environ.get("QERL_TEST_ENGINE", "vllm")
GIB = 2**30
MEMORY_GIB = 4  # of the engine, which has to be free again for the next one
LEFT_GIB = 0.5  # that may stay: workspaces of libraries, and the embedded model's own tensors

pytestmark = [pytest.mark.gpu(instead=ENGINE == "transformers"), pytest.mark.timeout(400)]


def digits(completions):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def fails(completions):
    raise ValueError("on purpose")


def used():
    gc.collect()
    return torch.cuda.memory_reserved() / GIB if torch.cuda.is_available() else 0.0


def test_runs_after_one_another_in_one_process(tmp_path, monkeypatch):
    """Two equal runs, a failed one between them; then generation and evaluation on the result."""
    monkeypatch.chdir(tmp_path)
    qerl.quantize("tiny")
    rollout = {"engine": ENGINE, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 16}
    if ENGINE == "vllm":
        rollout |= {"memory": MEMORY_GIB, "deterministic": True}
    recipe = qerl.Recipe.load("tiny").set(rollout=rollout, run={"steps": 2}, noise={"enabled": False})
    first = qerl.train(recipe, reward=digits, out="first")
    assert used() < LEFT_GIB
    with pytest.raises(qerl.QerlError, match="on purpose"):
        qerl.train(recipe, reward=fails, out="failed")
    second = qerl.train(recipe, reward=digits, out="second")
    assert used() < LEFT_GIB
    assert numbers(first.path) == numbers(second.path)
    assert same_adapters(first.adapter, second.adapter)
    with qerl.load(second, engine=ENGINE, memory=MEMORY_GIB if ENGINE == "vllm" else None) as model:
        texts = model.generate(["1 + 1?", "2 + 2?"], max_new_tokens=8)
    assert len(texts) == 2
    found = qerl.evaluate("arith", second, limit=4, max_new_tokens=8, engine=ENGINE)
    assert found.summary.questions == 4
    assert used() < LEFT_GIB
