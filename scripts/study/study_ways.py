"""Ways to train whole weights in a study, of which `qerl train` has the first.

PACKED    as `qerl train` does: trainer and engine multiply by the packed weights (training through the quantizer), or
          the trainer by the masters (`qat.forward: masters`)
DENSE     nothing is packed: trainer and engine multiply by 16-bit weights, which a sync writes from the masters

In both the optimizer changes masters in float32, and the result is what the engine would hold after one more
sync.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig

PACKED, DENSE = "packed", "dense"


@contextmanager
def trained_by(way: str) -> Iterator[None]:
    """Within it, `training.run.start` trains whole weights in this way; PACKED and "" change nothing."""
    if way != DENSE:
        yield
        return
    import training.run

    original = training.run.start_base
    training.run.start_base = _copied_base
    try:
        yield
    finally:
        training.run.start_base = original


def _copied_base(config: RunConfig, start: ModelRef, run_dir: Path, *given: Any) -> ModelRef:
    """RUN/base is the 16-bit model, so that the engine opens that and a sync copies masters over its weights."""
    from qerl.checkpoint.adapter_file import BASE
    from qerl.checkpoint.resolve import resolve_model

    if not (run_dir / BASE).exists():
        shutil.copytree(start.path, run_dir / BASE)
    return resolve_model(str(run_dir / BASE))
