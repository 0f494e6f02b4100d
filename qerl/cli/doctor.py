"""`qerl doctor`: versions, cards and kernels.

Which of our kernels work on this card: each does a small task, compared with its twin in plain torch.

`qerl doctor`: compares this machine with what was tested; each line is ok, a warning or an error with its remedy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from qerl import formats
from qerl.base.devices import FP8_CAPABILITY, best_card, choose_card, driver_version, visible_cards
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.fp8 import kv, training
from qerl.formats.fp8 import reference as fp8
from qerl.formats.nvfp4 import decode, gemm, lora, slab_layout
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, MARLIN, QERL, KernelLayout, KernelWeight, dequantize
from qerl.formats.nvfp4.layout import BLOCK
from qerl.model.decode_attention import Batch, Cache, Space, attend_, reference_attend_

if TYPE_CHECKING:
    from rich.table import Table


ROWS, COLUMNS, TOKENS, RANK = 256, 512, 8, 16
KV_SCALE = 2.0**-6  # of normal keys and values in 8 bits
ROUNDING = 1e-2  # relative error of a product whose values are stored in bfloat16
REMEDY = "compare driver and versions with the tested ones above; with those, it is a bug of qerl: report it"

Pair = tuple[torch.Tensor, torch.Tensor]  # what the kernel gives, and what its twin gives


def kernel_checks() -> list[Check]:
    """One line per kernel; one line for all if there is no card."""
    if not torch.cuda.is_available():
        return [Check("ok", "kernels", "need a CUDA card; without one the plain torch twins run")]
    device = torch.device("cuda", torch.cuda.current_device())
    found = kernel_check("kernel decode (triton)", lambda: _triton_decode(device), exact=True)
    found = [found, *_fp8_checks(device)]
    if not has_kernels(device):
        return [
            *found,
            Check("ok", "kernel decode, product, lora, attention (cuda)", "not used on this card: Hopper alone"),
        ]
    return [
        *found,
        kernel_check("kernel decode (cuda)", lambda: _cuda_decode(device), exact=True),
        kernel_check("kernel product (cuda)", lambda: _cuda_product(device)),
        kernel_check("kernel lora (cuda)", lambda: _cuda_lora(device)),
        kernel_check("kernel attention (cuda)", lambda: _cuda_attention(device)),
        kernel_check("kernel attention, 8-bit cache (cuda)", lambda: _cuda_attention(device, bits=8)),
    ]


def _fp8_checks(device: torch.device) -> list[Check]:
    """Decoding and packing FP8 weights, which any card can, and the products of both sides in FP8."""
    found = [
        kernel_check("kernel decode fp8 (triton)", lambda: _fp8_decode(device), exact=True),
        kernel_check("kernel pack fp8 (triton)", lambda: _fp8_pack(device), exact=True),
    ]
    what, capability = "kernel product fp8 (vllm)", torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        less = f"not on compute capability {capability}, which has no FP8: train on {formats.DEFAULT.label} weights"
        return [*found, Check("ok", what, less)]
    found.append(kernel_check("kernel product fp8, one scale (torch)", lambda: _fp8_tensorwise(device)))
    if find_spec("vllm") is None:
        return [*found, Check("ok", what, "needs vllm; without it the plain torch twin runs")]
    return [*found, kernel_check(what, lambda: _fp8_product(device))]


def kernel_check(what: str, run: Callable[[], Pair], exact: bool = False) -> Check:
    """Run a kernel and its twin and compare them: bit by bit if `exact`, else up to bfloat16 rounding."""
    try:
        value, expected = run()
        difference = (value.double() - expected.double()).norm() / expected.double().norm()
        error = difference.item()  # waits for the kernel: its errors come here
    except Exception as problem:  # of a compiler, a launch or a missing package: the kernel does not work here
        line = (str(problem).strip().splitlines() or [""])[0]
        return Check("error", what, f"{type(problem).__name__}: {line[:200]}", REMEDY)
    if not (error == 0.0 if exact else error <= ROUNDING):
        return Check("error", what, f"wrong values: relative error {error:.1e}", REMEDY)
    return Check("ok", what, "equal to its twin" if exact else f"relative error {error:.0e} to its twin")


def _triton_decode(device: torch.device) -> Pair:
    from qerl.formats.nvfp4.kernels import dequantize_

    layouts = (HUMMING_WGMMA, MARLIN)
    outs = [torch.empty(ROWS, COLUMNS, dtype=torch.float32, device=device) for _ in layouts]
    for out, layout in zip(outs, layouts, strict=True):
        dequantize_(out, _weight(layout, device))
    # torch divides by a number exactly on a CPU alone
    twins = [dequantize(_weight(layout, torch.device("cpu")), torch.float32) for layout in layouts]
    return torch.cat(outs), torch.cat(twins).to(device)


def _fp8_decode(device: torch.device) -> Pair:
    from qerl.formats.fp8 import kernels

    codes, scale = fp8.quantize(_normal((ROWS, COLUMNS), torch.device("cpu")))
    out = kernels.dequantize(codes.to(device), scale.to(device), torch.float32)
    return out, fp8.dequantize(codes, scale, torch.float32).to(device)


def _fp8_pack(device: torch.device) -> Pair:
    from qerl.formats.fp8 import kernels

    weight = _normal((ROWS, COLUMNS), torch.device("cpu"))
    expected, codes = fp8.quantize(weight), torch.empty(ROWS, COLUMNS, dtype=fp8.E4M3, device=device)
    scale = torch.empty_like(expected.scale, device=device)
    kernels.pack_(weight.to(device), codes, scale, "pow2")
    return fp8.dequantize(codes, scale, torch.float32), fp8.dequantize(*expected, torch.float32).to(device)


def _fp8_tensorwise(device: torch.device) -> Pair:
    sides = [_normal(shape, torch.device("cpu")) for shape in ((TOKENS, COLUMNS), (ROWS, COLUMNS))]
    rounded = [training.quantize_tensor(side.to(device)) for side in sides]
    x, weight = (training.quantize_tensor(side) for side in sides)
    twin = (x.codes.float() @ weight.codes.float().t()) * (x.scale * weight.scale)
    return training.scaled_product(*rounded, torch.bfloat16), twin.to(device)


def _fp8_product(device: torch.device) -> Pair:
    from qerl.engine.vllm.fp8 import product

    weight, x = fp8.quantize(_normal((ROWS, COLUMNS), device)), _normal((TOKENS, COLUMNS), device)
    return product(x, *weight, "pow2"), fp8.product(x.float(), weight)


def _cuda_decode(device: torch.device) -> Pair:
    weights = [_weight(layout, device) for layout in (QERL, HUMMING_WGMMA, MARLIN)]
    outs = [decode.decode_(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=device), each) for each in weights]
    return torch.cat(outs), torch.cat([decode.reference_decoded(each) for each in weights])


def _cuda_product(device: torch.device) -> Pair:
    weight, x, adapter = _weight(QERL, device), _normal((TOKENS, COLUMNS), device), _adapter(device)
    out = gemm.product(x, weight, None, adapter)
    return out, gemm.reference_product(x, weight, None, adapter)


def _cuda_lora(device: torch.device) -> Pair:
    out, x, adapter = _normal((TOKENS, ROWS), device), _normal((TOKENS, COLUMNS), device), _adapter(device)
    expected = lora.reference_add(out, x, adapter)
    return lora.add_(out, x, adapter), expected


def _cuda_attention(device: torch.device, bits: int = 16) -> Pair:
    heads, key_heads, head_dim, length = 8, 2, 128, 100
    query, key = _normal((heads, head_dim), device)[None], _normal((key_heads, head_dim), device)[None]
    cache = _normal((2 * 7 * 16, key_heads * head_dim), device).view(2, 7, 16, key_heads, head_dim)  # pages of 16
    pages = torch.arange(7, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    batch = Batch(pages, lengths, torch.tensor([length - 1], device=device))
    space, new, scale = Space(1, key_heads, head_dim, device, bits), (query, key, key), head_dim**-0.5
    space.plan_(lengths)
    held = Cache(*cache)
    if bits == 8:
        scales = torch.full((2,), KV_SCALE, device=device)
        held = Cache(*kv.encode(cache, KV_SCALE).view(torch.uint8), tuple(scales))
    out = attend_(torch.empty_like(query), new, held, batch, scale, space)
    return out, reference_attend_(torch.empty_like(query), new, held, batch, scale)


def _adapter(device: torch.device) -> lora.Adapter:
    lora_a = _normal((RANK, COLUMNS), device) / 32  # the base then has most of the product
    return lora.Adapter(lora_a, _normal((ROWS, RANK), device), (ROWS,))


def _weight(layout: KernelLayout, device: torch.device) -> KernelWeight:
    """A random weight.

    In our own layout random codes and scales are packed. In the others any words and scales are a weight, but for
    scales that are NaN (e4m3) or zero (Marlin).
    """
    generator = torch.Generator().manual_seed(0)
    low, high = (60, 120) if layout.marlin_scales else (0, 0x7F)
    scales = torch.randint(low, high, (COLUMNS // BLOCK, ROWS), generator=generator, dtype=torch.uint8)
    scales = scales if layout.marlin_scales else scales.view(torch.float8_e4m3fn)
    if layout is QERL:
        packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=generator, dtype=torch.uint8)
        words, scales = slab_layout.pack(packed, scales.t().contiguous())
    else:
        words = torch.randint(-(2**31), 2**31 - 1, (COLUMNS // BLOCK, 2 * ROWS), generator=generator, dtype=torch.int32)
    return KernelWeight(layout, words.to(device), scales.to(device), ROWS, COLUMNS, global_scale=1000.0)


def _normal(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    return torch.randn(shape, generator=generator).bfloat16().to(device)


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
    found = [_python(), *_names(), _torch(), *_pins(), *_cards()]  # chooses a card before torch looks for one
    if found_torch := _import_torch():
        found.append(found_torch)  # without torch nothing is known about the card
    else:
        found += [_gpu(), *kernel_checks(), _kernel_cache(), _engine()]
    return [*found, _plugin(), _disk(), _hub(), _token()]


def table(found: list[Check]) -> Table:
    """The checks as a table for a terminal."""
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


def _python() -> Check:
    return Check("ok", "python", ".".join(map(str, sys.version_info[:3])))


def _torch() -> Check:
    try:
        return Check("ok", "torch", version("torch"))
    except PackageNotFoundError:
        return Check("error", "torch", "missing", "run ./setup_env.sh")


def _pins() -> list[Check]:
    """Each package that pyproject.toml pins exactly, compared with what is installed. An extra may be missing."""
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


def _import_torch() -> Check | None:
    """Why torch cannot be imported; None if it can."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a CUDA library that it was built with is missing
        return Check("error", "gpu", f"unknown without torch ({_first_line(error)})", "run ./setup_env.sh")
    return None


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
    from qerl.formats.cuda.nvrtc import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set QERL_CACHE to a folder that can be written"
        return Check("error", "kernel cache", f"{folder}: {error.strerror or error}", remedy)
    kernels, tables = (len(list(folder.glob(pattern))) for pattern in ("*.cubin", "ways-*.json"))
    return Check("ok", "kernel cache", f"{folder}: {kernels} kernels, {tables} tables of times (rollout.tune_kernels)")


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
    from qerl.checkpoint.hub import LOG_IN, has_token

    if has_token():
        return Check("ok", "hub token", "present: gated models whose licence you accepted can be fetched")
    return Check("ok", "hub token", "none", f"gated models (llama3_8b) need one: {LOG_IN}")


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
