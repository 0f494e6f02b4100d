#!/usr/bin/env python3
"""4-bit activations on this card: our vLLM engine beside the trainer's model, and beside stock vLLM's own two ways.

    python3 scripts/checks/check_w4a4.py --model checkpoints/random-7b-w4a4-static --out w4a4.json

`--model` is a checkpoint with static scales. Four score the same completions, which the first has sampled:

    engine      ours; its CUDA graphs in decode steps (`sampled`), and a prefill (`score`)
    trainer     the policy model over the engine's tensors
    emulation   stock vLLM with linear_backend="emulation": rounded inputs, by vLLM's own arithmetic
    stock       stock vLLM as it comes: weight-only on a card without 4-bit products

Printed is how far each is from what the engine sampled: the mean of r - log r - 1 with r = exp(difference), and the
mean difference of logprobs. Emulation should be about as near as the trainer, and stock much farther.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
model, backend, rows, out, memory = sys.argv[1:]
rows = json.loads(open(rows).read())
llm = LLM(model, max_model_len=512, gpu_memory_utilization=float(memory), enforce_eager=True, linear_backend=backend)
params = SamplingParams(max_tokens=1, prompt_logprobs=0)
outputs = llm.generate([{"prompt_token_ids": p + c} for p, c in rows], params)
scores = [[list(at.values())[0].logprob for at in o.prompt_logprobs[len(p):]] for o, (p, c) in zip(outputs, rows)]
open(out, "w").write(json.dumps(scores))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--no-stock", action="store_true", help="for dynamic scales, which stock vLLM does not know")
    parser.add_argument("--memory-gib", type=float, default=40.0, help="of our engine")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from scripts.bench.provenance import command, machine, require_card, write

    require_card("vllm")
    kernel, rows, sampled, scores = ours(arguments)
    if not arguments.no_stock:
        with tempfile.TemporaryDirectory() as folder:
            for name, backend in (("emulation", "emulation"), ("stock", "auto")):
                scores[name] = by_stock(arguments.model, backend, rows, Path(folder))
    from engine_checks.compare import mismatch

    results = {name: mismatch(sampled, score) for name, score in scores.items()}
    report = {"command": command(), **machine(), "kernel": kernel, "from_sampled": results}
    write(report, arguments.out)
    print(f"{kernel}\n{'':12}{'kl':>12}{'mean |d|':>12}{'max |d|':>12}")
    for name, result in results.items():
        print(f"{name:12}{result['kl']:12.3g}{result['mean_abs']:12.3g}{result['max_abs']:12.3g}")


def ours(arguments: argparse.Namespace) -> tuple[str, list, list, dict[str, list]]:
    """(kernel, (prompt, completion) rows, sampling logprobs, logprobs by name) of our engine and of the trainer."""
    from engine_checks.compare import policy_logprobs

    from qerl.engine.interface import SamplingParams
    from qerl.engine.options import EngineOptions
    from qerl.engine.vllm.engine import VLLMEngine

    rng = random.Random(1)
    prompts = [[rng.randint(1, 256) for _ in range(rng.randint(16, 128))] for _ in range(arguments.prompts)]
    options = EngineOptions(max_context=512, max_sequences=64, cap_gib=arguments.memory_gib)
    engine = VLLMEngine(str(arguments.model), "nvfp4", options)
    completions = engine.generate(prompts, SamplingParams(arguments.new_tokens), seed=3)
    tokens = [list(each.token_ids) for each in completions]
    scores = {
        "score": engine.score(prompts, tokens),
        "trainer": policy_logprobs(engine.policy_model(), prompts, tokens),
    }
    kernel = engine.kernel
    engine.close()
    return kernel, list(zip(prompts, tokens, strict=True)), [each.logprobs for each in completions], scores


def by_stock(model: Path, backend: str, rows: list, folder: Path) -> list:
    """Logprobs of the completions by vLLM without our plugin, in a process of its own."""
    asked, out = folder / "rows.json", folder / f"{backend}.json"
    asked.write_text(json.dumps(rows), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "QERL_VLLM_PLUGIN"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", STOCK, *map(str, (model, backend, asked, out, 0.4))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        sys.exit(f"stock vLLM ({backend}) failed: {done.stderr[-3000:]}")
    return json.loads(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
