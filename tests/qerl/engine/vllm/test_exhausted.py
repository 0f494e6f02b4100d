"""If memory runs out, the error names keys of a recipe. The original texts are those of vLLM 0.25 and torch."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.exhausted import cannot_open

LONG = (
    "To serve at least one request with the models's max seq len (9217), (0.49 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (0.21 GiB). Based on the available memory, the estimated maximum model length "
    "is 3920. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
NONE_LEFT = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing."
SHARED = (
    "Free memory on device cuda:0 (10.5/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, 71.3 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
SPENT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has 3 MiB free.\nSee the manual")


@pytest.mark.parametrize(
    ("error", "cap_gib", "words"),
    [
        (ValueError(LONG), None, "lower rollout.max_new_tokens, or raise rollout.memory ("),
        (ValueError(LONG), 12.0, "lower rollout.max_new_tokens, or raise rollout.memory or memory.cap_gib ("),
        (ValueError(LONG), None, "the estimated maximum model length is 3920)"),
        (ValueError(NONE_LEFT), None, "one sequence of 9217 tokens"),
        (ValueError(NONE_LEFT), 12.0, "(No available memory for the cache blocks)"),
        (ValueError(SHARED), None, "end what else runs there (nvidia-smi), or lower rollout.memory ("),
        (ValueError(SHARED), 24.0, "or lower rollout.memory or memory.cap_gib (Free memory on device cuda:0 (10.5/"),
        (SPENT, None, "opening models/seven ran out of GPU memory: lower rollout.memory, or raise memory.cap_gib ("),
        (SPENT, 24.0, "3 MiB free.)"),
        (
            ValueError("rope_scaling is odd. Try again"),
            None,
            "cannot open models/seven: rope_scaling is odd. Try again",
        ),
    ],
)
def test_the_error_names_our_keys(error, cap_gib, words):
    settings = SimpleNamespace(base="models/seven", options=EngineOptions(cap_gib=cap_gib), model_len=9217)
    made = cannot_open(settings, error)
    assert isinstance(made, EngineError)
    assert words in str(made)
    for name in ("gpu_memory_utilization", "max_model_len", "GPU memory utilization or"):
        assert name not in str(made)
