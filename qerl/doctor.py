"""`qerl doctor`: what this machine has, against what was tested; each line ok, warning or error, with the remedy."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

MIN_FREE_GIB = 20  # a quantized 7B and its 16-bit source
PIN = re.compile(r"^([\w-]+)==([\w.]+)(?:;\s*extra == ['\"](\w+)['\"])?$")


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    level: Literal["ok", "warning", "error"]
    what: str
    found: str
    remedy: str = ""


def checks() -> list[Check]:
    """Everything that can be said about this machine without loading a model."""
    return [_python(), _torch(), *_pins(), _gpu(), _engine(), _disk()]


def table(found: list[Check]) -> Table:
    """The checks as a table for a terminal."""
    from rich.table import Table

    styles = {"ok": "green", "warning": "yellow", "error": "red"}
    result = Table("", "what", "found", "remedy", box=None)
    for check in found:
        result.add_row(f"[{styles[check.level]}]{check.level}[/]", check.what, check.found, check.remedy)
    return result


def _python() -> Check:
    return Check("ok", "python", ".".join(map(str, sys.version_info[:3])))


def _torch() -> Check:
    try:
        return Check("ok", "torch", version("torch"))
    except PackageNotFoundError:
        return Check("error", "torch", "missing", "run ./setup_env.sh")


def _pins() -> list[Check]:
    """Each package that pyproject.toml pins exactly, against what is installed; an extra that is missing is fine."""
    try:
        declared = requires("qerl") or []
    except PackageNotFoundError:
        return [Check("error", "qerl", "not installed", "run ./setup_env.sh")]
    pins = [match.groups() for requirement in declared if (match := PIN.match(requirement))]
    absent = {extra for package, _, extra in pins if extra and importlib.util.find_spec(package) is None}
    return [_pin(package, tested) for package, tested, extra in pins if extra not in absent]


def _pin(package: str, tested: str) -> Check:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Check("error", package, "missing", "run ./setup_env.sh")
    if installed != tested:
        return Check("warning", package, installed, f"tested with {tested}: run ./setup_env.sh")
    return Check("ok", package, installed)


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("warning", "gpu", "unknown without torch")
    import torch

    if not torch.cuda.is_available():
        return Check("ok", "gpu", "none")
    properties = torch.cuda.get_device_properties(0)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
    if properties.major < 8:
        return Check("error", "gpu", name, "bfloat16 needs compute capability 8.0 (Ampere) or newer")
    return Check("ok", "gpu", name)


def _engine() -> Check:
    """What `rollout.engine: auto` takes here."""
    if importlib.util.find_spec("torch") is None:
        return Check("warning", "engine", "unknown without torch")
    from qerl.engine import choose_engine

    return Check("ok", "engine", f"{choose_engine('auto')} (rollout.engine: auto)")


def _disk() -> Check:
    free_gib = shutil.disk_usage(".").free / 2**30
    if free_gib < MIN_FREE_GIB:
        return Check("warning", "disk", f"{free_gib:.0f} GiB free", "a 7B model and its NVFP4 copy take about 20 GiB")
    return Check("ok", "disk", f"{free_gib:.0f} GiB free")
