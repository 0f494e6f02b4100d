"""Models given by hub id (`owner/name`): find out what they are and get their files, through the hub's local cache."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from qerl.base.errors import CheckpointError
from qerl.base.nearby import is_path, no_folder
from qerl.checkpoint.hub_refusal import refusal

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def is_hub_id(ref: str) -> bool:
    """Whether `ref` has the form `owner/name` and is not a path on this machine."""
    return HUB_ID.fullmatch(ref) is not None and not Path(ref).exists()


def config_folder(ref: str) -> Path:
    """A folder in the hub's cache with a model's config.json, or with a whole adapter; downloads no model weights.

    Files that are already in the cache are used. Raises CheckpointError if there is no such model or no network.
    """
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(ref, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent

    def fetch() -> Path:
        try:
            return Path(hf_hub_download(ref, "config.json")).parent
        except LocalEntryNotFoundError:  # means that there is no network; a subclass of EntryNotFoundError
            raise
        except EntryNotFoundError:
            return Path(snapshot_download(ref, allow_patterns=["adapter_*", "*.json"]))

    return _from_hub(ref, fetch)


def download_model(ref: str, trust_remote_code: bool = False) -> Path:
    """A folder in the hub's cache with a model's safetensors, config and tokenizer, and its code if that is trusted.

    Raises CheckpointError if the hub has no such model, if it has no safetensors, or if the network or the disk fails.
    """
    from huggingface_hub import list_repo_files, snapshot_download

    patterns = [*MODEL_FILES, "*.py"] if trust_remote_code else MODEL_FILES
    if not reachable():
        return _from_hub(
            ref, lambda: Path(snapshot_download(ref, allow_patterns=patterns, local_files_only=True)), True
        )
    files = _from_hub(ref, lambda: list_repo_files(ref))
    if not any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(
            f"{ref} has no safetensors on the hub (only {', '.join(sorted(files)[:3])}...), and pickled weights are "
            "never read: take a safetensors version of the model"
        )
    logger.info("downloading %s (kept in the hub's cache)", ref)
    return _from_hub(ref, lambda: Path(snapshot_download(ref, allow_patterns=patterns)))


def _from_hub(ref: str, fetch: Callable[[], T], offline: bool = False) -> T:
    if not offline and not reachable():
        raise CheckpointError(
            f"{_not_here(ref)}, and the hub cannot be reached: check the name and the network, or give a folder with "
            "the model"
        )
    try:
        return fetch()
    except Exception as error:  # of httpx, of the hub's client, or an OSError; in each case there is no model
        if (refused := refusal(error, ref)) is not None:
            raise CheckpointError(f"{_not_here(ref)}, and {refused}; or give a folder with the model") from error
        raise CheckpointError(
            f"{_not_here(ref)}, and it cannot be fetched from the hub ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}): check the name and the network, or give a folder with the model"
        ) from error


def _not_here(ref: str) -> str:
    return no_folder(ref) if is_path(ref) else f"{ref} is no folder here"


def reachable() -> bool:
    """Whether the hub's name resolves. Without this check the hub's client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves the name
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
