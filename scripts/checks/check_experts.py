#!/usr/bin/env python3
"""Check on this card that the vllm engine serves a mixture of experts as the trainer computes it; prints one JSON.

    python3 scripts/checks/check_experts.py --model checkpoints/small-qwen3-moe [--experts per_expert] [--deterministic]

Each check returns numbers, and `LIMITS` says which of them may not be. The exit code is 1 if one is not kept, or if a
check raises; the others still run. tests/qerl/engine/test_experts_gpu.py runs this script on small models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_checks.experts import ExpertContext, adapter, cached_prompts, decoded, one_copy, replayed, routers
from engine_checks.memory import sleep_and_wake
from engine_checks.run import add_options, run, watch

from qerl import formats
from qerl.config.schema import AdapterConfig
from scripts.bench.provenance import require_card

CHECKS = [one_copy, decoded, routers, cached_prompts, replayed, sleep_and_wake, adapter]
LARGEST_KL = 1e-3  # with replay, of a small random model
LIMITS: dict[str, Callable[[dict[str, Any]], bool]] = {  # what has to hold of each check's numbers
    "one_copy": lambda found: not found["foreign"] and found["experts"] > 0,
    "decoded": lambda found: found["count"] == 0,
    "routers": lambda found: found["unrecorded"] == 0 and found["largest_gap"] < 1e-2,
    "cached_prompts": lambda found: all(found["equal"]) and not any(found["rows_missing"]),
    "replayed": lambda found: found["with_replay"]["kl"] < LARGEST_KL,
    "sleep_and_wake": lambda found: found["same_pointers"] and found["same"]["tokens"] > 0.25,  # near-ties
    "adapter": lambda found: (
        found["with_replay"]["kl"] < LARGEST_KL
        and found["changed"] > 0
        and found["changed_by_experts"] == (8 if found["on_experts"] else 0)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", default=formats.DEFAULT.name, choices=formats.names())
    kinds = get_args(AdapterConfig.model_fields["experts"].annotation)
    parser.add_argument("--experts", default="shared", choices=kinds, help="the kind of adapter on experts")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--expert-rank", type=int, default=8)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--memory", type=float, help="rollout.memory: GiB, or a share")
    add_options(parser, CHECKS)
    arguments = parser.parse_args()
    arguments.calibrate_kv, arguments.start, arguments.kernel, arguments.kv_cache_dtype = False, None, "auto", "auto"
    require_card("vllm")
    watch(arguments.patience)  # while the engine opens
    run(ExpertContext(arguments), CHECKS, arguments, lambda name, found: LIMITS[name](found))


if __name__ == "__main__":
    main()
