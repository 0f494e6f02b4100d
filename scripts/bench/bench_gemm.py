#!/usr/bin/env python3
"""Speed, error and repeatability of the ways to multiply by an NVFP4 weight, by shape and tokens; writes JSON.

    python3 scripts/bench/bench_gemm.py --out benchmarks/gemm-7b.json

The ways are Humming with and without stream-K, Marlin (both through vLLM), decoding to bfloat16 for cuBLAS, and cuBLAS
on a dense bfloat16 weight. The error is the norm of the difference from the float64 product of the exact weights,
divided by the norm of that product. Repeatability is how many of 8 calls differ from the first in any bit. Times are
microseconds, the median of CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.reference import NVFP4Tensor
from scripts.bench.provenance import command, machine, require_card

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # Qwen2.5-7B
TOKENS = (1, 8, 32, 56, 64, 128, 256, 512, 2048, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card("vllm")
    report = {"command": command(), **machine(), "results": []}
    for name in arguments.shapes:
        rows, columns = SHAPES[name]
        weight = Weight(rows, columns)
        for tokens in arguments.tokens:
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            expected = None if tokens > 2048 else x.double() @ weight.exact.double().t()
            for way, call in weight.ways().items():
                row = {"shape": name, "tokens": tokens, "way": way, **_measure(call, x, expected)}
                report["results"].append(row)
                print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=0) + "\n", encoding="utf-8")


class Weight:
    """One random weight in the form that each way needs."""

    def __init__(self, rows: int, columns: int) -> None:
        dense = torch.randn(rows, columns, device="cuda").mul_(0.02).bfloat16()
        self.tensors = reference.quantize(dense)
        self.rows, self.columns = rows, columns
        self.dense = reference.dequantize_unchecked(*self.tensors, torch.bfloat16)
        self.exact = reference.dequantize_unchecked(*self.tensors, torch.float32)
        self.humming, self.marlin = humming_layer(self.tensors), self._marlin()

    def ways(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {
            "humming": lambda x: call_humming(self.humming, x),
            "humming_no_stream_k": lambda x: call_humming(self.humming, x, batch_invariant=True),
            "marlin": self._call_marlin,
            "decode_cublas": self._call_decoded,
            "bf16_cublas": lambda x: x @ self.dense.t(),
        }

    def _marlin(self) -> torch.nn.Module:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

        layer = _layer(self.rows, self.columns)
        for name, tensor in zip(("weight", "weight_scale"), self.tensors[:2], strict=True):
            setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        layer.weight_global_scale = torch.nn.Parameter(1 / self.tensors.global_scale[0], requires_grad=False)
        prepare_fp4_layer_for_marlin(layer)
        return layer

    def _call_marlin(self, x: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

        layer = self.marlin
        scales = (layer.weight_scale, layer.weight_global_scale)
        return apply_fp4_marlin_linear(x, layer.weight, *scales, layer.workspace, self.rows, self.columns)

    def _call_decoded(self, x: torch.Tensor) -> torch.Tensor:
        from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, KernelWeight
        from qerl.formats.nvfp4.kernels import dequantize_

        weight = (
            KernelWeight(
                HUMMING_WGMMA,
                self.humming.weight.data,
                self.humming.weight_scale.data,
                self.rows,
                self.columns,
                self.tensors.global_scale.item(),
            )
            if not hasattr(self, "_kernel_weight")
            else self._kernel_weight
        )
        self._kernel_weight = weight
        dense = dequantize_(torch.empty(self.rows, self.columns, device="cuda", dtype=torch.bfloat16), weight, 0, False)
        return torch.addmm(x.new_zeros(1), x, dense.t(), beta=0, alpha=weight.alpha)


def humming_layer(tensors: NVFP4Tensor) -> torch.nn.Module:
    """A weight in the form that Humming takes, packed by vLLM."""
    from vllm.model_executor.layers.quantization.utils.humming_utils import prepare_humming_layer

    rows, half = tensors.packed.shape
    layer = _layer(rows, 2 * half)
    for name, tensor in tensors.named().items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float"}
    prepare_humming_layer(layer, {**config, "num_bits": 4, "strategy": "group", "group_size": 16})
    return layer


def call_humming(layer: torch.nn.Module, x: torch.Tensor, batch_invariant: bool = False) -> torch.Tensor:
    """x W^T by Humming; `batch_invariant` switches stream-K off."""
    from vllm.utils.humming import HummingMethod

    config = {"use_batch_invariant": batch_invariant, "use_f16_accum": False, "gemm_type": "dense"}
    return HummingMethod.forward_layer(layer=layer, inputs=x, compute_config=config)


def _layer(rows: int, columns: int) -> torch.nn.Module:
    """A module with the attributes that vLLM's packers require of a linear."""
    layer = torch.nn.Module()
    layer.output_partition_sizes, layer.input_size_per_partition = [rows], columns
    layer.output_size_per_partition = rows
    layer.params_dtype, layer.has_bias = torch.bfloat16, False
    return layer


def _measure(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: torch.Tensor | None) -> dict:
    outputs = [call(x) for _ in range(8)]
    different = sum(not torch.equal(outputs[0], other) for other in outputs[1:])
    error = None if expected is None else max(_relative(out, expected) for out in outputs)
    return {"us": round(_time(call, x), 1), "error": error, "repeats_different": different}


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


def _time(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int = 10) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call(x)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[2]


if __name__ == "__main__":
    main()
