#!/usr/bin/env python3
"""Check on this card that the vllm engine and the trainer's model over its tensors agree; prints one JSON object.

    python3 scripts/checks/check_engine.py --model checkpoints/random-7b-NVFP4A16 [--kernel marlin] [--deterministic]

Each check returns numbers. tests/qerl/engine/vllm/test_vllm_engine_gpu.py runs this script on small models and has the
limits for them. If a check raises, that is reported, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_checks.calls import carried_over, told_of_while
from engine_checks.compare import agreement, oracle, temperature
from engine_checks.context import Context
from engine_checks.memory import exhausted_cache, loading, reopened, shared_memory, sleep_and_wake
from engine_checks.run import add_options, run, watch
from engine_checks.sampling import limits, repeat, sampler, steps
from engine_checks.sync import adapter, trained_norms, whole_weights
from engine_checks.weights import dequantization, noise, product

from qerl import formats
from scripts.bench.provenance import require_card

RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", default=formats.DEFAULT.name, choices=formats.names())
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--calibrate-kv", action="store_true", help="8-bit keys and values get scales of the prompts")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--memory", type=float, help="rollout.memory: GiB, or a share")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--start", type=int, metavar="RANK", help="a start acts beside the base: its own, or random")
    add_options(parser, [*CHECKS, *ON_REQUEST])
    arguments = parser.parse_args()
    require_card("vllm")
    watch(arguments.patience)  # while the engine opens
    run(Context(arguments), [*CHECKS, *ON_REQUEST] if arguments.only else CHECKS, arguments)


CHECKS = [
    *(shared_memory, dequantization, product, limits, agreement, temperature, oracle, repeat),
    *(steps, noise, sleep_and_wake, adapter, trained_norms, sampler, whole_weights),
]
ON_REQUEST = [exhausted_cache, loading, told_of_while, carried_over, reopened]  # run only if --only names them

if __name__ == "__main__":
    main()
