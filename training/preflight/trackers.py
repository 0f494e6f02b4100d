"""Whether the trackers of a recipe can report, before anything heavy is loaded. No torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from qerl.base.errors import ConfigError

OFFLINE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE that need no key


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed, or for wandb if it would ask for a key."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logging.report_to names {name}, which is not installed: run `pip install {name}`, or leave it out "
                "(metrics.jsonl is written in any case)"
            )
    if "wandb" in names and not _wandb_has_key():
        raise ConfigError(
            "logging.report_to names wandb, which has no key here: run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to keep its files in the run until `wandb sync` (metrics.jsonl is written in any case)"
        )


def _wandb_has_key() -> bool:
    """Whether wandb finds a key where it looks for one, or needs none, by its settings of environment and files."""
    import wandb

    settings = wandb.setup().settings
    if os.environ.get("WANDB_MODE", settings.mode) in OFFLINE or settings.api_key or settings.identity_token_file:
        return True
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        from wandb.sdk.lib.wbauth.wbnetrc import read_netrc_auth  # wandb 0.31.0; it has no public function for this
    except ImportError:
        return True  # wandb itself then says what is missing
    try:
        return read_netrc_auth(host=settings.base_url) is not None
    except wandb.errors.AuthenticationError:  # a key that cannot be one
        return False
