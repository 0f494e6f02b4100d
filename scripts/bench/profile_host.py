#!/usr/bin/env python3
"""What the host does in a training step outside of its phases, in the order of time: what `time/other_s` consists of.

    python3 scripts/bench/profile_host.py --model checkpoints/random-7b-NVFP4A16 --out host-7b.json
    python3 -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench/profile_host.py --model ...

The workload and its options are those of scripts/bench/bench_step.py. From the beginning of step `--step` to that of
the step after it every call is noted under its caller. A phase (of training/run_dir/phase_times.py, sampling, or a
sync) is noted as a whole, without the calls in it. Before and after a phase the host waits for the card, so nothing
overlaps and each second is seen where it is spent. Noting the calls takes time as well: compare the sums with
`time/other_s` of the other steps, which are printed beside them. Of several ranks each prints its own.

Printed are the calls of at least `--least` ms, indented under their callers, and at the end what each function took by
itself outside of phases.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.host_calls import Call, Recorder

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel

SAMPLING = ("run",)  # methods of an engine
STEP_ENDS = "the step ends"  # what is after it is not part of time/step_s


def main() -> None:
    from scripts.bench.bench_step import add_options

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--step", type=int, default=3, help="the step that is noted, the first one being 1")
    parser.add_argument("--least", type=float, default=1.0, help="ms of a call that is shown")
    arguments = parser.parse_args()
    if not 1 <= arguments.step < arguments.steps:
        parser.error(f"--step {arguments.step} needs a step after it: write --steps {arguments.step + 1} or more")
    from qerl.base.devices import choose_card
    from qerl.base.parallel import open_parallel

    with open_parallel() as parallel:
        choose_card(parallel.local_rank if parallel.size > 1 else None)  # before torch looks at the cards
        report = profiled(arguments, parallel)
        for rank in range(parallel.size):
            if rank == parallel.rank:
                print("\n".join(text(report, rank)), flush=True)
            parallel.barrier()
    if parallel.first and arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def profiled(arguments: argparse.Namespace, parallel: Parallel) -> dict[str, Any]:
    """Train, and what one step consisted of on this rank."""
    import torch

    from qerl.config.recipe import load_recipe
    from scripts.bench.bench_step import overrides
    from scripts.bench.provenance import command, machine
    from training.run import start

    found: list[Call] = []
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    recorder = Recorder(arguments.least / 1e3, wait)
    with tempfile.TemporaryDirectory() as own, watched(recorder, arguments.step, found):
        folder = Path(parallel.broadcast(own))
        config = load_recipe("dapo_7b", overrides(arguments, folder) if parallel.first else [])
        result = start(parallel.broadcast(config), "host", parallel)
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        parallel.barrier()  # before the folder goes
    steps = [json.loads(line) for line in lines]
    times = [{key: value for key, value in step.items() if key.startswith("time/")} for step in steps]
    (step,) = found
    return {"command": command(), **machine(), "step": arguments.step, "calls": as_record(step), "times": times}


@contextmanager
def watched(recorder: Recorder, number: int, found: list[Call]) -> Iterator[None]:
    """Let `recorder` note step `number` of the run within the block, and put it into `found`."""
    from training import run as training_run
    from training.rollout.sampler import Sampler
    from training.run_dir.phase_times import PhaseTimes

    begun = 0
    begin_step, begin, end, metrics = PhaseTimes.begin_step, PhaseTimes.begin, PhaseTimes.end, PhaseTimes.metrics
    open_engine = training_run.open_rollout_engine

    def new_step(self: PhaseTimes) -> None:
        nonlocal begun
        begun += hasattr(self, "_began")  # which it has not while it is made
        if recorder.running:
            found.append(recorder.stop())
        begin_step(self)
        if begun == number and not found:
            recorder.start()

    def new_phase(self: PhaseTimes, name: str) -> None:
        recorder.begin(name)
        begin(self, name)

    def end_phase(self: PhaseTimes) -> None:
        end(self)
        recorder.end()

    def step_metrics(self: PhaseTimes, counted_s: float) -> dict[str, float]:
        recorder.mark(STEP_ENDS)
        return metrics(self, counted_s)

    with ExitStack() as patches:

        def engine(*args: Any, **kwargs: Any) -> Any:
            opened = open_engine(*args, **kwargs)
            for name in SAMPLING:
                patches.enter_context(as_phase(recorder, type(opened), name, "rollout"))
            return opened

        times = {"begin_step": new_step, "begin": new_phase, "end": end_phase, "metrics": step_metrics}
        patches.enter_context(mock.patch.multiple(PhaseTimes, **times))
        patches.enter_context(mock.patch.object(training_run, "open_rollout_engine", engine))
        patches.enter_context(as_phase(recorder, Sampler, "sync", "sync"))
        yield


def as_phase(recorder: Recorder, owner: type, name: str, phase: str) -> AbstractContextManager:
    """Within it, the calls of a method are noted as a phase."""
    method = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder.begin(phase)
        try:
            return method(*args, **kwargs)
        finally:
            recorder.end()

    return mock.patch.object(owner, name, noted)


def as_record(call: Call) -> dict[str, Any]:
    """A call as JSON, in milliseconds."""
    record = {"name": call.name, "at_ms": round(1e3 * call.at, 3), "ms": round(1e3 * call.seconds, 3)}
    if call.phase:
        record["phase"] = True
    return record | ({"calls": [as_record(each) for each in call.calls]} if call.calls else {})


def by_itself(calls: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """{function: [ms without the calls that are listed, number of calls]} of all calls that are no phases."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for call in calls:
        if call.get("phase"):
            continue
        inner = call.get("calls", [])
        sums[call["name"]][0] += call["ms"] - sum(each["ms"] for each in inner)
        sums[call["name"]][1] += 1
        for name, (ms, count) in by_itself(inner).items():
            sums[name][0] += ms
            sums[name][1] += count
    return dict(sums)


def in_step(report: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """The calls of the step alone, and its ms."""
    calls = report["calls"]["calls"]
    at = next(index for index, call in enumerate(calls) if call["name"] == STEP_ENDS)
    return calls[:at], calls[at]["at_ms"]


def text(report: dict[str, Any], rank: int = 0) -> Iterator[str]:
    """The report for people, line by line."""
    yield f"rank {rank}, step {report['step']}: {report['calls']['ms']:.1f} ms until the next step"
    yield from lines(report["calls"]["calls"])
    calls, ms = in_step(report)
    phases = sum(ms_of_phases(call) for call in calls)
    yield f"the step has {ms:.1f} ms, its phases {phases:.1f}, which leaves {ms - phases:.1f}; by function:"
    sums = by_itself(calls)
    sums["(functions that are not listed)"] = [ms - sum(call["ms"] for call in calls), 1]
    for name, (own, count) in sorted(sums.items(), key=lambda item: -item[1][0]):
        yield f"{own:10.1f} ms {count:6d} x  {name}"
    for number, step in enumerate(report["times"], start=1):
        yield f"step {number}: " + ", ".join(f"{key.removeprefix('time/')} {value:.3f}" for key, value in step.items())


def ms_of_phases(call: dict[str, Any]) -> float:
    """Of a call and all within it."""
    return call["ms"] if call.get("phase") else sum(map(ms_of_phases, call.get("calls", [])))


def lines(calls: Sequence[dict[str, Any]], depth: int = 0) -> Iterator[str]:
    """Each call with those that it makes, in the order of time; phases in brackets."""
    for call in calls:
        name = f"[{call['name']}]" if call.get("phase") else call["name"]
        yield f"{call['at_ms']:10.1f} {call['ms']:10.1f} ms  {'  ' * depth}{name}"
        yield from lines(call.get("calls", []), depth + 1)


if __name__ == "__main__":
    main()
