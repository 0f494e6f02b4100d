"""Reports that libraries send to their makers: off, unless the environment variable QERL_TELEMETRY is 1.

TRL tells the Hugging Face hub of every trainer that it makes, vLLM of every engine, and others of errors or imports.
They read these variables when they are imported, so importing any of our packages sets them first of all.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ALLOWED = "QERL_TELEMETRY"
VARIABLES = {
    "DO_NOT_TRACK": "1",  # vLLM, huggingface_hub and others, see donottrack.sh
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and through it TRL, transformers and trackio
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",  # vLLM and lighteval import ray where it is installed
    "GRADIO_ANALYTICS_ENABLED": "False",  # trackio's dashboard
    "WANDB_ERROR_REPORTING": "false",  # errors of wandb itself; a run's metrics go where the recipe says
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # lighteval's litellm would fetch a price list when it is imported
}


def disable_telemetry(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that switch it off, except for those that the user has set."""
    if environ.get(ALLOWED, "").lower() in ("1", "true", "yes"):
        return
    for name, value in VARIABLES.items():
        environ.setdefault(name, value)
