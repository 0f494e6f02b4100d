"""Upload a finished folder to the hub. What can be checked first is checked before any work is done."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.hub import HUB_ID, reachable

logger = logging.getLogger(__name__)


def check_push(repo: str) -> None:
    """Raise unless `repo` (owner/name) can be pushed to: checks its form, the network, and the token."""
    if not HUB_ID.fullmatch(repo):
        raise ConfigError(f"--push-to-hub {repo!r} is no hub id: write owner/name, such as me/Qwen2.5-7B-gsm8k")
    from huggingface_hub import HfApi, get_token

    if not reachable():
        raise CheckpointError(
            f"{repo} cannot be pushed: the hub cannot be reached from here (or HF_HUB_OFFLINE is set); leave "
            "--push-to-hub out, and upload the folder later with `hf upload`"
        )
    if get_token() is None:
        raise CheckpointError(
            f"{repo} cannot be pushed: no hub token is set; run `hf auth login`, or set HF_TOKEN to a token that "
            "may write"
        )
    try:
        user = HfApi().whoami()
    except Exception as error:  # of httpx, of the hub's client, or an OSError
        raise CheckpointError(
            f"{repo} cannot be pushed: the hub does not take the token ({_first_line(error)}); run `hf auth login` "
            "with one that may write"
        ) from error
    logger.info("will push to %s as %s", repo, user.get("name"))


def push(folder: Path, repo: str, private: bool, command: str) -> str:
    """Upload `folder` as a model repository and return its address. An existing repository gets another commit.

    `command` is what made it, for the commit's message."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Upload by qerl {command}")
    except Exception as error:  # of httpx, of the hub's client, or an OSError
        raise CheckpointError(
            f"{folder} is complete, but could not be pushed to {repo} ({_first_line(error)}): try again with "
            f"`hf upload {repo} {folder}`"
        ) from error
    return str(url)


def _first_line(error: Exception) -> str:
    return re.split(r"[\r\n]", str(error).strip(), maxsplit=1)[0] or type(error).__name__
