"""Models given by hub id (`owner/name`): get their files through the hub's local cache.

Links in a model's folder are followed within it, and in the hub's cache to the blobs of the same model, nowhere else. A
model comes from others, and its files' content ends up in copies, cards, logs and prompts: a link in it could bring any
file of this machine there.
"""

import logging
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from qerl.base.errors import CheckpointError, first_line
from qerl.base.files import is_path, no_folder
from qerl.base.hub import HUB_ID, reachable, refusal

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def is_hub_id(ref: str) -> bool:
    """Whether `ref` has the form `owner/name` and is not a path on this machine."""
    return HUB_ID.fullmatch(ref) is not None and not Path(ref).exists()


def cached_config(ref: str) -> Path | None:
    """A model's config.json in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(ref, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def config_folder(ref: str) -> Path:
    """A folder in the hub's cache with a model's config.json, or with a whole adapter; downloads no model weights.

    Files that are already in the cache are used. Raises CheckpointError if there is no such model or no network.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if (cached := cached_config(ref)) is not None:
        return cached.parent

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
            f"{first_line(error)}): check the name and the network, or give a folder with the model"
        ) from error


def _not_here(ref: str) -> str:
    return no_folder(ref) if is_path(ref) else f"{ref} is no folder here"


TEMPLATES = "additional_chat_templates"  # a folder of a model, which transformers reads and quantize copies
READ = (*MODEL_FILES, "*.py", "README.md", "tokenizer*", "vocab*", "chat_template*", TEMPLATES)


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a file of a model or an adapter is a link out of its folder.

    In the hub's cache, `models--owner--name/snapshots/commit/`, files are links into `models--owner--name/blobs/`.
    """
    real = folder.resolve()
    allowed = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        allowed.append(real.parents[1] / "blobs")
    for path in _links(folder):
        target = path.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{path} is a link to {target}, out of the model's folder, and such links are not followed: copy the "
                "file there in its place"
            )


def _links(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if any(fnmatchcase(path.name, pattern) for pattern in READ):
            if path.is_symlink():
                yield path
            elif path.name == TEMPLATES and path.is_dir():
                yield from (each for each in path.rglob("*") if each.is_symlink())
