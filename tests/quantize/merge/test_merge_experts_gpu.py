"""Stock vLLM, without qerl's plugin, gives the greedy tokens of base + adapter from a merged mixture of experts.

    python -m pytest -m gpu -n0 tests/quantize/merge/test_merge_experts_gpu.py

On Hopper vLLM 0.25.1 multiplies experts in 16 bits by its Triton kernel and those in NVFP4 by Marlin, which takes the
sizes of tiny_experts (128 and 64) without padding and gate's global scale for up. Both cases passed on an H200 on
2026-11-24, at commit 5e792ce, in 136 s.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from qerl.checkpoint.resolve import resolve_model
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.greedy_tokens import NEW_TOKENS, arith_prompts, engine_tokens, same
from tests.helpers.stock_vllm import stock_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and importlib.util.find_spec("vllm")), reason="needs a CUDA device and vllm"
    ),
]


@pytest.fixture(scope="module")
def expected(on_experts):
    """Prompts, and the tokens of the transformers engine on the CPU. Without the adapter it is another policy."""
    base = resolve_model(str(on_experts)).base
    prompts = arith_prompts(base, 32)
    tokens = engine_tokens(on_experts, prompts)
    assert same(tokens, engine_tokens(base, prompts)) <= 10
    return SimpleNamespace(prompts=prompts, tokens=tokens)


# In float32 on a CPU both give all 32. Rounding to bfloat16 may decide a near tie otherwise: there NVFP4 gave 31.
@pytest.mark.parametrize(("to", "least"), [("bf16", 30), ("nvfp4", 28)])
def test_stock_vllm_loads_the_merged_experts(on_experts, expected, tmp_path, to, least):
    out = export(ExportOptions(str(on_experts), to, tmp_path / "merged", prompt_count=0, device="cpu")).out
    assert same(stock_tokens(out, expected.prompts, tmp_path, NEW_TOKENS), expected.tokens) >= least
