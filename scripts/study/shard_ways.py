#!/usr/bin/env python3
"""Ways to share whole weights out among ranks: bytes that each rank keeps, and seconds of a step; prints a table.

    export OMP_NUM_THREADS=1
    python3 -m torch.distributed.run --standalone --nproc-per-node 2 scripts/study/shard_ways.py --out F

A stack of linears is trained by AdamW on two micro-batches per rank, and packed for sampling after the step, over gloo
on a CPU. The ways:

    layers       qerl's (training/policy/shards.py): gradients summed on the rank that has the master, packed bits sent
    fsdp2        torch's fully_shard over the masters: gathered for each forward and backward pass, gradients
                 reduce-scattered; then gathered once more, to be packed on each rank
    zero         ZeroRedundancyOptimizer: all masters on all ranks, gradients all-reduced, updated masters broadcast

Bytes are per weight and rank; those on the wire follow from the algorithms, by gathering (n - 1) / n of a tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from qerl.base.parallel import Parallel, open_parallel
from qerl.formats.nvfp4 import reference

LAYERS, WIDTH, ROWS, MICRO_BATCHES, STEPS = 12, 1024, 64, 2, 4
PACKED = 0.5625  # bytes of a packed weight
Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import os

    given = dict(os.environ)
    with open_parallel() as parallel:
        os.environ.update(given)  # for torch's own ways, which need its default group
        dist.init_process_group("gloo")
        found = {way.__name__: measured(*way(parallel), parallel) for way in (layers, fsdp2, zero)}
        dist.destroy_process_group()
        if parallel.first:
            print("\n".join(f"{name:8} {of_way}" for name, of_way in found.items()))
            if arguments.out:
                arguments.out.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def backward(model: nn.Module) -> None:
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()


def pack(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors to multiply by, of a master."""
    return list(reference.quantize(weight, torch.tensor([64.0])))[:2]


def layers(parallel: Parallel) -> tuple[Step, float, float]:
    """Every second linear's master is here."""
    model, size = stack(), parallel.size
    owners = {linear: index % size for index, linear in enumerate(model)}
    own = [linear for linear in model if owners[linear] == parallel.rank]
    optimizer = torch.optim.AdamW([linear.weight for linear in own])
    served = {linear: pack(linear.weight.detach()) for linear in model}
    sums = {linear: torch.zeros_like(linear.weight) for linear in own}

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            backward(model)
            for linear in reversed(model):
                parallel.sum_to_(linear.weight.grad, owners[linear])
                if linear in sums:
                    sums[linear] += linear.weight.grad
                linear.weight.grad = None
        for linear, total in sums.items():
            linear.weight.grad = total
        optimizer.step()
        for linear in model:
            if linear in sums:
                served[linear] = pack(linear.weight.detach())
            parallel.send_(served[linear], owners[linear])

    share = (size - 1) / size
    return step, (4 + 4 + 8) / size + 4 / LAYERS, MICRO_BATCHES * 4 * share + PACKED * share


def fsdp2(parallel: Parallel) -> tuple[Step, float, float]:
    """`fully_shard` of each linear."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, size = stack(), parallel.size
    mesh = init_device_mesh("cpu", (size,))
    for linear in model:
        fully_shard(linear, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        for linear in model:
            pack(linear.weight.detach().full_tensor())

    share = (size - 1) / size
    return step, (4 + 4 + 8) / size + 8 / LAYERS, (MICRO_BATCHES * 3 + 1) * 4 * share


def zero(parallel: Parallel) -> tuple[Step, float, float]:
    """Moments shared out."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, size = stack(), parallel.size
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            backward(model)
        for linear in model:
            dist.all_reduce(linear.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        for linear in model:
            pack(linear.weight.detach())

    share = (size - 1) / size
    return step, 4 + 4 + 8 / size, 2 * 4 * share + 4 * share


def measured(step: Step, kept: float, wire: float, parallel: Parallel) -> dict[str, float]:
    """The fastest of some steps, after a first one."""
    seconds = []
    for _ in range(STEPS + 1):
        parallel.barrier()
        started = time.perf_counter()
        step()
        seconds.append(max(parallel.gather(time.perf_counter() - started)))
    return {"kept_bytes": round(kept, 2), "wire_bytes": round(wire, 2), "step_s": round(min(seconds[1:]), 3)}


if __name__ == "__main__":
    main()
