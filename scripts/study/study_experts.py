"""Does a mixture of experts learn like its dense twin? GRPO on tiny_experts beside tiny, with each kind of adapter.

    python scripts/study/study_experts.py run --base qerl/tiny_experts --task arith --engine transformers ...
    python scripts/study/study_experts.py report benchmarks/experts/study-experts-tiny.json

docs/mixture-of-experts.md has the complete command. Queue, recipe and intervals are those of
scripts/study/study_noise.py. Both models are packed in NVFP4, the adapters have the rank that a recipe gives
them, and the routers are frozen. The twin was made in the same way from the same corpus (scripts/models).
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from study_arms import EXPERTS_ARMS
    from study_noise import arguments, follow

    follow(arguments(__doc__.splitlines()[0], EXPERTS_ARMS, (1e-3,)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
