"""qerl: reinforcement learning of language models on one GPU, on a frozen NVFP4 base with BF16 LoRA adapters.

    import qerl

    recipe = qerl.Recipe.load("tiny").set("run.steps=10")
    run = qerl.train(recipe, reward=lambda completions, **columns: [-len(text) for text in completions])
    run.metrics, run.adapter, run.plot()

Importing this loads nothing, and switches off what libraries report to their makers. A name of the Python interface
(docs/python-api.md) is imported when it is first used.
"""

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl.api.model import Model as Model
    from qerl.api.model import load as load
    from qerl.api.recipe import Recipe as Recipe
    from qerl.api.run import Run as Run
    from qerl.api.run import plot as plot
    from qerl.api.run import runs as runs
    from qerl.api.training import compare as compare
    from qerl.api.training import distill as distill
    from qerl.api.training import evaluate as evaluate
    from qerl.api.training import export as export
    from qerl.api.training import merge as merge
    from qerl.api.training import quantize as quantize
    from qerl.api.training import sft as sft
    from qerl.api.training import train as train
    from qerl.base.errors import QerlError as QerlError

__version__ = "0.2.0"

_PLACES = {  # name -> the module that defines it
    name: module
    for module, names in {
        "qerl.api.model": ("Model", "load"),
        "qerl.api.recipe": ("Recipe",),
        "qerl.api.run": ("Run", "plot", "runs"),
        "qerl.api.training": ("compare", "distill", "evaluate", "export", "merge", "quantize", "sft", "train"),
        "qerl.base.errors": ("QerlError",),
    }.items()
    for name in names
}
__all__ = ["__version__", *_PLACES]

# Reports that libraries send to their makers. TRL tells the Hugging Face hub of every trainer that it makes, vLLM of
# every engine, and others of errors or imports. They read these variables when they are imported.
TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",  # vLLM, huggingface_hub and others, see donottrack.sh
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and through it TRL, transformers and trackio
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # mlflow takes no other value of DO_NOT_TRACK either
    "RAY_USAGE_STATS_ENABLED": "0",  # vLLM and lighteval import ray where it is installed
    "GRADIO_ANALYTICS_ENABLED": "False",  # trackio's dashboard
    "WANDB_ERROR_REPORTING": "false",  # errors of wandb itself; a run's metrics go where the recipe says
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # lighteval's litellm would fetch a price list when it is imported
}


def disable_telemetry(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of TELEMETRY_OFF, except for those that the user has set; none if QERL_TELEMETRY is 1."""
    if environ.get("QERL_TELEMETRY", "").lower() in ("1", "true", "yes"):
        return
    for name, value in TELEMETRY_OFF.items():
        environ.setdefault(name, value)


disable_telemetry()  # before any library is imported


def __getattr__(name: str) -> object:
    """A name of the Python interface, imported now (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module 'qerl' has no attribute {name!r}; it has {', '.join(sorted(_PLACES))}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
