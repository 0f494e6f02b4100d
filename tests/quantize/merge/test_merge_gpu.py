"""Stock vLLM, without qerl's plugin, gives the greedy tokens of base + adapter from what `qerl merge` writes.

All last passed on an H200 on 2026-11-22, vLLM 0.25.1.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from qerl.tasks import build_messages, get_task, load_examples, render_prompt
from quantize.merge.options import MergeOptions
from quantize.merge.run import merge
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and importlib.util.find_spec("vllm")), reason="needs a CUDA device and vllm"
    ),
]
ROOT = Path(__file__).parents[3]
TOKENS = 48
STOCK = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, adapter, prompts = sys.argv[1], sys.argv[2], json.loads(open(sys.argv[3]).read())
lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
llm = LLM(model, max_model_len=512, gpu_memory_utilization=0.2, enforce_eager=True, **lora)
params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[5]))
request = LoRARequest("adapter", 1, adapter) if adapter else None
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, lora_request=request)
open(sys.argv[4], "w").write(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The trained run, prompts, and the greedy tokens of the transformers engine on the CPU with the run's adapter."""
    folder = tmp_path_factory.mktemp("work")
    base = folder / "checkpoints" / "tiny-NVFP4A16"
    quantize_checkpoint("tiny", base, QuantizeOptions(device="cpu"))
    shutil.copytree(ROOT / "tests" / "data" / "tiny_run", folder / "runs" / "tiny_run")
    tokenizer, task = load_tokenizer(base), get_task("arith")
    examples, _ = load_examples("arith", split="test", limit=32)
    prompts = [render_prompt(tokenizer, build_messages(task, example.question)) for example in examples]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    options = EngineOptions(engine="transformers", device="cpu")
    engine = open_model(resolve_model(str(folder / "runs" / "tiny_run")), options)
    greedy = engine.generate(prompts, SamplingParams(TOKENS, temperature=0.0))
    (folder / "expected.json").write_text(json.dumps([completion.token_ids for completion in greedy]))
    return folder


def vllm_tokens(work, model, adapter=""):
    """Greedy tokens of stock vLLM, in a separate process where qerl's plugin is off."""
    environment = {name: value for name, value in os.environ.items() if name != "QERL_VLLM_PLUGIN"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    out = work / "tokens.json"
    arguments = (model, adapter, work / "prompts.json", out, TOKENS)
    command = [sys.executable, "-c", STOCK, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def same(work, tokens):
    expected = json.loads((work / "expected.json").read_text())
    return sum(a == b for a, b in zip(tokens, expected, strict=True))


def export(work, to):
    run = work / "runs" / "tiny_run"
    return merge(MergeOptions(str(run), to, work / f"merged-{to}", prompt_count=0, device="cpu"))


def test_stock_vllm_loads_the_adapter_folder(work):
    report = export(work, "adapter")
    base = report.commands["vllm"].split()[2]
    assert same(work, vllm_tokens(work, base, report.out)) >= 30  # bfloat16 rounding may decide a near tie otherwise
    assert same(work, vllm_tokens(work, base)) <= 16  # without the adapter it is another policy


@pytest.mark.parametrize(("to", "least"), [("bf16", 30), ("nvfp4", 26)])
def test_stock_vllm_loads_the_merged_model(work, to, least):
    assert same(work, vllm_tokens(work, export(work, to).out)) >= least


def test_the_effect_is_measured_on_the_vllm_engine(work):
    run = work / "runs" / "tiny_run"
    report = merge(MergeOptions(str(run), "bf16", work / "measured", prompt_count=16, max_new_tokens=TOKENS))
    assert report.effect.kept > 0.95
    assert report.effect.prompts > 0
    assert report.effect.same_greedy > 0.8 * report.effect.prompts
