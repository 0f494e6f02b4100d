"""The installed versions of the packages that a result depends on."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

import qerl

PACKAGES = ("qerl", "torch", "transformers", "peft", "vllm", "compressed-tensors", "llmcompressor", "math-verify")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The version of Python and of those that are installed, by name."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):  # an editable install keeps the version that it was made with
            found[package] = qerl.__version__ if package == "qerl" else metadata.version(package)
    return found
