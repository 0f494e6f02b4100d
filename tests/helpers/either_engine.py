"""The engine of tests for cards: vLLM, or on a CPU the other one, if QERL_TEST_ENGINE=transformers asks for it."""

import importlib.util
import os

import pytest
import torch

ENGINE = os.environ.get("QERL_TEST_ENGINE", "vllm")
ON_CARD = ENGINE == "vllm"


def marks(timeout_s):
    """What such a file has as `pytestmark`."""
    lacking = ON_CARD and not (torch.cuda.is_available() and importlib.util.find_spec("vllm"))
    return [
        pytest.mark.gpu(instead=not ON_CARD),
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(lacking, reason="needs a CUDA device and vllm"),
    ]
