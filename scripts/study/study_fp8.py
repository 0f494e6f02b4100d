"""Does training in FP8 learn? Whole weights in 16 bits, in FP8 throughout, and in 16 bits with FP8 rollouts.

    python scripts/study/study_fp8.py run --base qerl/tiny --task arith --engine transformers --parallel 1 ...
    python scripts/study/study_fp8.py report benchmarks/fp8/study-fp8-tiny.json   # -> docs/images, and a page

docs/study.md has the complete commands. Queue, recipe, choice of the rate and intervals are those of
scripts/study/study_noise.py. `fp8_both` packs masters to FP8 at each sync and multiplies by them in engine and trainer,
whose gradients to the input are in FP8 too; `fp8_rollout` is the peers' way (`qat.forward: masters`). `--arms bf16 fp8`
compares adapters.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from study_arms import FP8_ARMS
    from study_noise import arguments, follow

    follow(arguments(__doc__.splitlines()[0], FP8_ARMS, (1e-3,)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
