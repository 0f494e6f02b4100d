"""What a measurement depends on beside its command: the code's commit, the card, versions of packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "humming-kernels",
    "compressed-tensors",
)


def machine() -> dict[str, object]:
    """Of this process: card (None: a CPU), commit, and packages (None: not installed)."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "commit": commit(), "versions": found}


def require_card(*packages: str) -> None:
    """Exit with a line that says so where torch finds no CUDA card, or one of `packages` is not installed."""
    import torch

    script = Path(sys.argv[0]).name
    if not torch.cuda.is_available():
        sys.exit(f"{script} measures on a CUDA card, and torch finds none: run it on a machine with one")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{script} needs {package}, which is not installed: run `pip install 'qerl[gpu]'`")


def commit(root: Path = ROOT) -> str:
    """QERL_COMMIT where it is set: what measures may be a copy without history. Else git's short HEAD of the checkout
    `root`, with "-dirty" if a tracked file other than a result in benchmarks/ is changed. Else ""."""
    told = os.environ.get("QERL_COMMIT")
    if told:
        return told
    head = _git(root, "rev-parse", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks")
    return f"{head}-dirty" if head and changed else head


def _git(root: Path, *words: str) -> str:
    """What git says of `root`; "" without git, or if `root` is no checkout (one around it does not count)."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
