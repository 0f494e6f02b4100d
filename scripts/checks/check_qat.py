#!/usr/bin/env python3
"""Train through the quantizer and compare what the engine then holds with the reference; prints JSON.

    python3 scripts/checks/check_qat.py --run runs/check [--steps 4] [--engine vllm] [--set KEY=VALUE ...] --out F

The run is that of the recipe `qat_tiny`, on the embedded model, and it finishes as any run. At the last sync each
packed linear of the engine, read by the inverse of its layout, is compared with `reference.quantize` of the master (in
a run of n steps that is the master after n - 1), and its address with that at the first sync. Greedy tokens for prompts
of the first rollout are asked for at the first and at the last rollout. tests/training/test_qat_gpu.py has the limits.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="its directory, which must be new")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from scripts.bench.provenance import write

    print(write(checked(arguments), arguments.out))


def checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and what was seen."""
    from qerl.config.recipe import load_recipe
    from scripts.bench.watch import Watch
    from training.run import start

    overrides = [f"rollout.engine={arguments.engine}", *arguments.set]
    config = load_recipe("qat_tiny", overrides, steps=arguments.steps, out=str(arguments.run))
    kind = engine_kind(arguments.engine)
    with Watch(kind, arguments.steps) as watch, Greedy(kind, arguments.steps) as greedy:
        result = start(config, "check")
    lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    mismatches = [json.loads(line)["mismatch_kl"] for line in lines]
    return {"sync": watch.seen, "greedy": greedy.tokens, "mismatch_kl": mismatches, "graphs": greedy.graphs}


def engine_kind(name: str) -> type:
    if name == "vllm":
        from qerl.engine.vllm.engine import VLLMEngine

        return VLLMEngine
    from qerl.engine.transformers.engine import TransformersEngine

    return TransformersEngine


class Greedy:
    """Within it, the first and the last call of `generate` also ask for greedy tokens of the first call's prompts."""

    def __init__(self, kind: type, last: int) -> None:
        self._kind, self._generate, self.last = kind, kind.generate, last
        self.calls, self.tokens, self.prompts = 0, [], []
        self.graphs = ""  # how vLLM uses CUDA graphs, in its words

    def __enter__(self) -> Greedy:
        greedy = self

        def generate(engine: Any, prompts: Any, *given: Any, **named: Any) -> list:
            greedy._on_generate(engine, prompts)
            return greedy._generate(engine, prompts, *given, **named)

        self._kind.generate = generate
        return self

    def __exit__(self, *exception: object) -> None:
        self._kind.generate = self._generate

    def _on_generate(self, engine: Any, prompts: Any) -> None:
        from qerl.engine.interface import SamplingParams

        self.calls += 1
        if self.calls not in (1, self.last):
            return
        self.prompts = self.prompts or [*prompts][::8]
        done = self._generate(engine, self.prompts, SamplingParams(NEW_TOKENS, temperature=0.0))
        self.tokens.append([completion.token_ids for completion in done])
        if engine.name == "vllm":
            self.graphs = engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name


if __name__ == "__main__":
    main()
