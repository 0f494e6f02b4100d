"""Greedy tokens of stock vLLM, in a separate process where qerl's plugin is off."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx

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


def served_tokens(line, prompts, folder, new_tokens):
    """The same, asked of the server that a printed line `vllm serve ...` starts, for the model that it names last."""
    words = shlex.split(line)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = ["--max-model-len", "512", "--gpu-memory-utilization", "0.2", "--enforce-eager", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "QERL_VLLM_PLUGIN"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words[1:], *limits]
    asked = {"model": words[-1].partition("=")[0], "prompt": prompts, "max_tokens": new_tokens, "temperature": 0}
    log = folder / "served.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            for _ in range(240):
                assert server.poll() is None, log.read_text()[-3000:]
                with suppress(httpx.TransportError):
                    if client.get("/health").is_success:
                        break
                time.sleep(1)
            reply = client.post("/v1/completions", json=asked | {"return_token_ids": True}).raise_for_status().json()
    finally:
        server.terminate()
        server.wait(30)
    return [choice["token_ids"] for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]
