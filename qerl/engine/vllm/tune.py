"""Choose how the engine multiplies by weights of each shape, from times that are measured once on this card.

A way to multiply is timed inside a CUDA graph, as in decoding, over so many layers of the shape that their weights do
not fit the card's cache; `qerl.formats.nvfp4.ways` keeps the times. However a kernel was chosen, its results are
compared with those of the decoded weight: for Humming and Marlin at each size of the CUDA graphs, for our own kernel at
each of `ways.TOKENS`. Sizes at which a kernel is wrong are left to other ways.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from qerl.base.devices import driver_version
from qerl.engine.vllm.products import BASES, WAYS, Base
from qerl.formats.cuda import nvrtc
from qerl.formats.cuda.timing import cold_layers, graph_us
from qerl.formats.nvfp4 import decode, expand, gemm, lora, ranks, tiling, ways

logger = logging.getLogger(__name__)

CALLS = 3


def choose_ways_(tune: bool, sizes: Sequence[int]) -> None:
    """Give each base of `BASES` its ways from the table of this card; `tune` first measures what the table lacks.

    `sizes`: numbers of tokens at which kernels other than ours are checked.
    """
    shapes: dict[ways.Shape, list[Base]] = {}
    for base in BASES.values():
        shapes.setdefault(base.shape, []).append(base)
    facts = card_facts()
    path = ways.table_path(nvrtc.cache_folder(), facts)
    times = ways.read_table(path)
    lacking = [shape for shape in shapes if shape.name not in times] if tune else []
    for shape in lacking:
        logger.info("measuring the ways to multiply by %s", shape.name)
        times[shape.name] = ways.measure(shape, partial(_time_us, shapes[shape]))
    if lacking:
        ways.write_table(path, facts, {shape.name: times[shape.name] for shape in lacking})
    for shape, bases in shapes.items():
        chosen = shape.ways(times)
        at = ways.TOKENS if shape.kernel == "qerl" else sizes
        checked = [size for size in at if ways.way_of(chosen, size) == "kernel"]
        wrong = ways.wrong_sizes(shape.name, {size: _error(bases[0], "kernel", size) for size in checked})
        left_out = {ways.bucket(size) for size in wrong} | ways.unchecked(at)
        fused = [size for size in ways.TOKENS if "fused" in shape.right_ways(size)]
        errors = {size: _error(bases[0], "fused", size) for size in fused}
        wrong_fused = ways.wrong_sizes(shape.name, errors, "our product")
        for base in bases:
            base.ways = shape.ways(times, left_out, wrong_fused)
    torch.cuda.empty_cache()
    measured = sum(shape.name in times for shape in shapes)
    summary = ways.summary({shape: bases[0].ways for shape, bases in shapes.items()})
    logger.info("ways to multiply, %d of %d shapes measured (%s):\n%s", measured, len(shapes), path, summary)


@torch.inference_mode()
def _error(base: Base, way: str, tokens: int) -> float:
    """A way's largest relative error against the decoded weight over CALLS calls; rounding gives 0.002 to 0.005."""
    generator = torch.Generator(device=base.weight.words.device).manual_seed(tokens)
    x = torch.randn(tokens, base.weight.in_features, device=base.weight.words.device, generator=generator).bfloat16()
    bias = getattr(base.layer, "bias", None)
    exact = WAYS["decoded"](base, x, bias, None).float()
    results = [WAYS[way](base, x, bias, None).float() for _ in range(CALLS)]
    return max(((result - exact).norm() / exact.norm().clamp_min(1e-30)).item() for result in results)


def card_facts() -> dict[str, str]:
    """All that measured times depend on."""
    sources = (
        *sorted(nvrtc.FOLDER.glob("*.cu*")),
        *(Path(module.__file__) for module in (decode, expand, gemm, lora, ranks, tiling)),
    )
    return {
        "card": torch.cuda.get_device_name(),
        "driver": str(driver_version()),
        "torch": torch.__version__,
        "vllm": _version("vllm"),
        "humming": _version("humming-kernels"),
        "kernels": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@torch.inference_mode()
def _time_us(bases: Sequence[Base], way: str, tokens: int) -> float:
    """Microseconds of one product of `tokens` tokens with a layer of the shape."""
    weight = bases[0].weight
    layers = bases[: cold_layers(weight.words.nbytes + weight.scales.nbytes)]
    x = torch.randn(tokens, weight.in_features, device=weight.words.device, dtype=torch.bfloat16)
    calls = [partial(WAYS[way], base, x, getattr(base.layer, "bias", None), base.adapter) for base in layers]
    return graph_us(calls) / len(calls)
