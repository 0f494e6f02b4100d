"""Ways to train whole weights in a study, of which `qerl train` has the first.

PACKED    trainer and engine multiply by the packed weights (training through the quantizer)
MASTERS   the trainer multiplies by the masters, and only the engine by packed weights: training that does not know of
          the 4 bits in which it samples and is served
DENSE     nothing is packed: trainer and engine multiply by 16-bit weights, which a sync writes from the masters

In all of them the optimizer changes masters in float32, and the result is what the engine would hold after one more
sync.
"""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine
    from training.policy.policy import WeightsPolicy

PACKED, MASTERS, DENSE = "packed", "masters", "dense"


@contextmanager
def trained_by(way: str) -> Iterator[None]:
    """Within it, `training.run.start` trains whole weights in this way; PACKED and "" change nothing."""
    import training.run

    name, replacement = {
        MASTERS: ("build_weights_policy", _by_masters(training.run.build_weights_policy)),
        DENSE: ("start_base", _copied_base),
    }.get(way, ("start_base", training.run.start_base))
    original = getattr(training.run, name)
    setattr(training.run, name, replacement)
    try:
        yield
    finally:
        setattr(training.run, name, original)


def _copied_base(config: RunConfig, start: ModelRef, run_dir: Path, *given: Any) -> ModelRef:
    """RUN/base is the 16-bit model, so that the engine opens that and a sync copies masters over its weights."""
    from qerl.checkpoint.resolve import resolve_model
    from qerl.checkpoint.weights_run import BASE

    if not (run_dir / BASE).exists():
        shutil.copytree(start.path, run_dir / BASE)
    return resolve_model(str(run_dir / BASE))


def _by_masters(build: Callable[..., WeightsPolicy]) -> Callable[..., WeightsPolicy]:
    def built(engine: Engine, *given: Any) -> WeightsPolicy:
        policy = build(engine, *given)
        multiply_by_masters_(policy.base_model, engine)
        return policy

    return built


def multiply_by_masters_(model: nn.Module, engine: Engine) -> None:
    """Let each linear that has a master multiply by it, except while `engine` generates or scores."""
    from qerl.layers.master import master_of

    sampling: list[bool] = []  # not empty while the engine computes
    for module in [*model.modules()]:
        if master_of(module) is not None:
            _multiply_by_master_(module, sampling)
    for name in ("generate", "score"):
        setattr(engine, name, _noting(getattr(engine, name), sampling))


def _multiply_by_master_(module: nn.Linear, sampling: list[bool]) -> None:
    import torch

    from qerl.layers.lora import Part, lora_linear
    from qerl.layers.master import master_of

    master = master_of(module)
    with torch.device("meta"):
        dense = torch.nn.Linear(module.in_features, module.out_features, bias=False)
    dense.weight = torch.nn.Parameter(master.data, requires_grad=False)  # the same memory
    dense.register_parameter("bias", module.bias)
    parts = (Part(dense, master=master), Part(module, master=master))
    module.lora_part = lambda: parts[len(sampling)]  # which the fused layers ask for
    module.forward = types.MethodType(lambda self, x: lora_linear(x, [self.lora_part()]), module)


def _noting(call: Callable[..., Any], sampling: list[bool]) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        sampling.append(True)
        try:
            return call(*given, **named)
        finally:
            sampling.pop()

    return noted
