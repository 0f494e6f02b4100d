"""qerl: reinforcement learning of language models on one GPU, on a frozen NVFP4 base with BF16 LoRA adapters.

    import qerl

    recipe = qerl.Recipe.load("tiny").set("run.steps=10")
    run = qerl.train(recipe, reward=lambda completions, **columns: [-len(text) for text in completions])
    run.metrics, run.adapter, run.plot()

Importing this loads nothing: a name of the Python interface (docs/python-api.md) is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.base.telemetry import disable_telemetry

if TYPE_CHECKING:
    from qerl.api.model import Model as Model
    from qerl.api.model import load as load
    from qerl.api.recipe import Recipe as Recipe
    from qerl.api.run import Run as Run
    from qerl.api.run import plot as plot
    from qerl.api.training import compare as compare
    from qerl.api.training import distill as distill
    from qerl.api.training import evaluate as evaluate
    from qerl.api.training import export as export
    from qerl.api.training import merge as merge
    from qerl.api.training import quantize as quantize
    from qerl.api.training import sft as sft
    from qerl.api.training import train as train
    from qerl.base.errors import QerlError as QerlError

__version__ = "0.1.0"

_PLACES = {  # name -> the module that defines it
    "Model": "qerl.api.model",
    "QerlError": "qerl.base.errors",
    "Recipe": "qerl.api.recipe",
    "Run": "qerl.api.run",
    "compare": "qerl.api.training",
    "distill": "qerl.api.training",
    "evaluate": "qerl.api.training",
    "export": "qerl.api.training",
    "load": "qerl.api.model",
    "merge": "qerl.api.training",
    "plot": "qerl.api.run",
    "quantize": "qerl.api.training",
    "sft": "qerl.api.training",
    "train": "qerl.api.training",
}
__all__ = ["__version__", *_PLACES]

disable_telemetry()  # before any library is imported


def __getattr__(name: str) -> object:
    """A name of the Python interface, imported now (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module 'qerl' has no attribute {name!r}; it has {', '.join(_PLACES)}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
