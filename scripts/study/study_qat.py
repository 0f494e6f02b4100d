"""Does training through the quantizer learn? An adapter, and whole weights in three ways, by the same learning.

    python scripts/study/study_qat.py run --base qerl/tiny --task arith --engine transformers --parallel 1 ...
    python scripts/study/study_qat.py report benchmarks/qat/study-qat-tiny.json   # -> docs/images, and a page

docs/study.md has the complete commands. The queue, the recipe, the choice of the learning rate and the intervals are
those of scripts/study/study_noise.py; `--rates` are for adapters and `--weights-rates` for the others. The arms are
a LoRA beside the NVFP4 base, and the three ways of scripts/study/study_ways.py. `--arms nvfp4 nvfp4_rounded packed_in`
compares adapters: beside the base, merged to 4 bits at the end, and trained through the quantizer. With `--parallel 1`
the second of them merges what the first has trained; otherwise it may train the same again.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from study_arms import QAT_ARMS
    from study_noise import arguments, follow

    follow(arguments(__doc__.splitlines()[0], QAT_ARMS, (1e-3,)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
