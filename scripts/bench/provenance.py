"""What a measurement depends on: its command, the commit of the code, the card, the versions of packages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "vllm", "transformers", "trl", "peft", "accelerate")
PACKAGES += ("humming-kernels", "compressed-tensors")


def machine() -> dict[str, object]:
    """The card (None: a CPU), the commit and the package versions (None: not installed) of this process.

    QERL_BESIDE, if it is set, says what ran on other cards of the host at the same time, and QERL_CAPABILITY which
    other card's code this one ran.
    """
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    told = {"beside": os.environ.get("QERL_BESIDE"), "capability": os.environ.get("QERL_CAPABILITY")}
    return {"gpu": gpu, "commit": commit(), "versions": found, **{name: value for name, value in told.items() if value}}


def write(report: object, path: Path | None) -> str:
    """The report as JSON, which the file `path` then has, if there is one."""
    text = json.dumps(report, indent=1)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return text


def command() -> str:
    """The command line of this process without folders of this machine, as `without_folders` leaves it."""
    return " ".join(without_folders(word) for word in sys.argv)


def without_folders(text: str) -> str:
    """`text` with absolute paths in it relative to the checkout, or, where they lie elsewhere, as their last name."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.:/\-\]])/(?:[\w.+\-]+/)*([\w.+\-]+)", r"\1", text)


def require_card(*packages: str) -> None:
    """Exit with a message if torch finds no CUDA card, or if one of `packages` is not installed."""
    import torch

    script = Path(sys.argv[0]).name
    if not torch.cuda.is_available():
        sys.exit(f"{script} measures on a CUDA card, and torch finds none: run it on a machine with one")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{script} needs {package}, which is not installed: run `pip install 'qerl[gpu]'`")


def commit(root: Path = ROOT) -> str:
    """QERL_COMMIT if it is set, for copies without history; otherwise git's short HEAD of the checkout `root`.

    "-dirty" is appended if a tracked file other than a result in benchmarks/ was changed. "" if there is no history.
    """
    told = os.environ.get("QERL_COMMIT")
    if told:
        return told
    head = _git(root, "rev-parse", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks")
    return f"{head}-dirty" if head and changed else head


def _git(root: Path, *words: str) -> str:
    """The output of git in `root`; "" without git, or if `root` itself is not a checkout."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
