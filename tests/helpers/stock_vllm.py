"""Greedy tokens of stock vLLM, in a separate process where qerl's plugin is off."""

import json
import os
import subprocess
import sys

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


def stock_tokens(model, prompts, folder, new_tokens, adapter=""):
    """The tokens of each of `prompts` (token ids); `folder` takes two files."""
    environment = {name: value for name, value in os.environ.items() if name != "QERL_VLLM_PLUGIN"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    asked, out = folder / "stock_prompts.json", folder / "stock_tokens.json"
    asked.write_text(json.dumps(prompts))
    command = [sys.executable, "-c", STOCK, *map(str, (model, adapter, asked, out, new_tokens))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())
