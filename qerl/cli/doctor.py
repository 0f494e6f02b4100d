"""`qerl doctor`: compares this machine with what was tested; each line is ok, a warning or an error with its remedy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qerl.base.devices import best_card, choose_card, driver_version, visible_cards

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("qerl", "quantize", "training", "eval")  # names so general that other projects use them too
HUB_TIMEOUT_S = 3.0
IN_USE = 0.1  # share of the card's memory that others may hold without a warning
MIN_FREE_GIB = 20  # for a quantized 7B and its 16-bit source
PIN = re.compile(r"^([\w-]+)==([\w.]+)(?:;\s*extra == ['\"](\w+)['\"])?$")


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    level: Literal["ok", "warning", "error"]
    what: str
    found: str
    remedy: str = ""


def checks() -> list[Check]:
    """Everything that can be checked without loading a model."""
    python = Check("ok", "python", ".".join(map(str, sys.version_info[:3])))
    found = [python, *_names(), _pin("torch", None), *_pins(), *_cards()]  # a card before torch looks for one
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a CUDA library that it was built with is missing
        found.append(Check("error", "gpu", f"unknown without torch ({_first_line(error)})", "run ./setup_env.sh"))
    else:
        from qerl.cli.doctor_kernels import kernel_checks

        found += [_gpu(), *kernel_checks(), _kernel_cache(), _engine()]
    return [*found, _plugin(), _disk(), _hub(), _token()]


def table(found: list[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "error": "red"}
    result = Table("", "what", "found", "remedy", box=None)
    for check in found:
        result.add_row(Text(check.level, styles[check.level]), check.what, check.found, check.remedy)
    return result


def as_json(found: list[Check]) -> str:
    """A list of objects with level, what, found and remedy."""
    return json.dumps([asdict(check) for check in found], indent=1)


def _pins() -> list[Check]:
    """Each package that pyproject.toml pins exactly, compared with what is installed. An extra may be missing."""
    try:
        declared = requires("qerl") or []
    except PackageNotFoundError:
        return [Check("error", "qerl", "not installed", "run ./setup_env.sh")]
    pins = [match.groups() for requirement in declared if (match := PIN.match(requirement))]
    absent = {extra for package, _, extra in pins if extra and importlib.util.find_spec(package) is None}
    return [_pin(package, tested) for package, tested, extra in pins if extra not in absent]


def _pin(package: str, tested: str | None) -> Check:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Check("error", package, "missing", "run ./setup_env.sh")
    if tested is not None and installed != tested:
        return Check("warning", package, installed, f"tested with {tested}: run ./setup_env.sh")
    return Check("ok", package, installed)


def _names() -> list[Check]:
    """Whether Python finds our packages under their names and not another project's."""
    home = Path(__file__).resolve().parents[2]
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or []] if spec else []
        if home / name not in folders:
            origin = (spec.origin or ", ".join(map(str, folders))) if spec else "nowhere"
            remedy = f"qerl's is in {home}: leave the other folder, or take it out of PYTHONPATH or the environment"
            found.append(Check("error", f"package {name}", f"found in {origin}", remedy))
    return found or [Check("ok", "packages", ", ".join(PACKAGES))]


def refuse_clashes() -> None:
    """End the process with one line if Python finds another project's package instead of ours."""
    for check in _names():
        if check.level == "error":
            sys.stderr.write(f"error: {check.what}: {check.found}; {check.remedy}\n")
            sys.exit(2)


def _cards() -> list[Check]:
    """Which of several visible cards a run would take; from here on this process takes it too."""
    seen = visible_cards()
    choose_card()
    if len(seen) < 2:
        return []
    return [Check("ok", "card", f"of {len(seen)} visible ones {best_card(seen)}; --gpu picks another")]


def _gpu() -> Check:
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        if driver is None:
            return Check("ok", "gpu", "none: training and evaluation run on the CPU")
        build = f"torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else " (CPU)")
        remedy = "a newer driver" if torch.version.cuda else "run ./setup_env.sh, which installs torch for CUDA"
        return Check("error", "gpu", f"driver {driver}, but {build} sees no card", remedy)
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    name = f"{properties.name}, {total / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}, "
    name += f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    if properties.major < 8:
        return Check("error", "gpu", name, "bfloat16 needs compute capability 8.0 (Ampere) or newer")
    if free < (1 - IN_USE) * total:
        remedy = "another process holds the rest (nvidia-smi): end it, or write memory.cap_gib"
        return Check("warning", "gpu", f"{name}, {free / 2**30:.0f} GiB free", remedy)
    return Check("ok", "gpu", name)


def _kernel_cache() -> Check:
    """The user's folder of compiled kernels; without it every process compiles them again, or fails."""
    from qerl.formats.cuda import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set QERL_CACHE to a folder that can be written"
        return Check("error", "kernel cache", f"{folder}: {error.strerror or error}", remedy)
    return Check("ok", "kernel cache", f"{folder}: {len(list(folder.glob('*.cubin')))} kernels")


def _engine() -> Check:
    """The engine that `rollout.engine: auto` stands for here."""
    from qerl.engine.open import choose_engine

    return Check("ok", "engine", f"{choose_engine('auto')} (rollout.engine: auto)")


def _plugin() -> Check:
    """Whether processes that vLLM starts find our plugin; in our own process the engine registers it."""
    if importlib.util.find_spec("vllm") is None:
        return Check("ok", "vllm plugin", "not needed without vllm")
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == "qerl"]
    if not points:
        return Check("error", "vllm plugin", "no entry point `qerl`", "run ./setup_env.sh: it installs the package")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "qerl" not in allowed.split(","):
        return Check("error", "vllm plugin", f"VLLM_PLUGINS={allowed} leaves it out", "unset it, or add qerl")
    try:
        points[0].load()
    except Exception as error:
        return Check("error", "vllm plugin", f"cannot be loaded: {_first_line(error)}", "run ./setup_env.sh")
    return Check("ok", "vllm plugin", f"{points[0].value}; every run checks that it acts")


def _disk() -> Check:
    free_gib = shutil.disk_usage(".").free / 2**30
    if free_gib < MIN_FREE_GIB:
        return Check("warning", "disk", f"{free_gib:.0f} GiB free", "a 7B model and its NVFP4 copy take about 20 GiB")
    return Check("ok", "disk", f"{free_gib:.0f} GiB free")


def _hub() -> Check:
    """Models and data by hub id need the hub, unless they are in its cache; folders do not."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Check("ok", "hub", "not asked (HF_HUB_OFFLINE): what is in its cache can be used")
    trouble: list[str] = [f"no answer in {HUB_TIMEOUT_S:.0f} s"]

    def ask() -> None:
        try:
            httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            trouble.clear()  # the hub is there, whatever it answers
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            trouble.append(_first_line(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)  # resolving the host's name has no timeout of its own
    if trouble:
        remedy = "give models and data as folders, or check the network and HF_ENDPOINT"
        return Check("warning", "hub", f"{constants.ENDPOINT}: {trouble[-1]}", remedy)
    return Check("ok", "hub", constants.ENDPOINT)


def _token() -> Check:
    """Whether there is a token for the hub. What it is, is nobody's business."""
    from qerl.base.hub import LOG_IN, has_token

    if has_token():
        return Check("ok", "hub token", "present: gated models whose licence you accepted can be fetched")
    return Check("ok", "hub token", "none", f"gated models (llama3_8b) need one: {LOG_IN}")


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
