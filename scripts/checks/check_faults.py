#!/usr/bin/env python3
"""Let one rank of a run fail, again and again, and measure how the others stop and whether the run goes on as it was.

    python3 scripts/checks/check_faults.py --runs runs/faults --out faults.json [--kills 10] [--qat] [--engine vllm]

A run is killed by SIGKILL to one rank, drawn as the moment is, and resumed to be killed again; after the last kill it
goes on to its end, and is compared with a run that nobody killed. Then a rank runs out of memory, finds a NaN, or has a
reward that raises. Ranks are started without torch's launcher, which would end the others itself: here they notice by
what qerl does. With --hosts there is a launcher for every --per-host ranks, as on hosts of their own, and a whole host
is killed. With --left the run goes on after the last kill on so many hosts, whose sums are in another order. Ranks talk
by gloo on a CPU and take a card each where there are several.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # for processes started here
sys.path.insert(0, str(ROOT))

LIMIT_S = 60.0  # until the other ranks have stopped
START_S = 300.0  # until a started run has made a step
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "run.save_every=1",
    "noise.num_stages=3",
)
STEPS_PER_KILL = 4
AS_RANK = "--as-rank"  # then a fault or nothing, and the words after `qerl train`
FAULT = "QERL_CHECK_FAULT"
REWARD = f"""
import os

def length(completions, step, **columns):
    if step > 1 and os.environ.get("{FAULT}") == "reward":
        raise ZeroDivisionError("asked to")
    return [float(len(text)) for text in completions]
"""
FAULTS = {  # what a rank does in its second step, and what all ranks are to say of it
    "out of memory": "the GPU has no memory left for micro-batches",
    "NaN": "the loss of step 2 is nan",
    "reward": "reward length raised ZeroDivisionError: asked to",
}


def main() -> None:
    if sys.argv[1:2] == [AS_RANK]:
        as_rank(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a new folder for the runs")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    parser.add_argument("--hosts", action="store_true", help="torch's launcher for ranks, as on hosts of their own")
    parser.add_argument("--per-host", type=int, default=1, help="ranks of a launcher, with --hosts")
    parser.add_argument("--left", type=int, help="hosts, or ranks without --hosts, that go on after the last kill")
    parser.add_argument("--qat", action="store_true", help="whole weights, which the ranks share out")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True)
    if arguments.ranks % arguments.per_host or (arguments.per_host > 1 and not arguments.hosts):
        parser.error(f"--per-host {arguments.per_host} needs --hosts, and --ranks that it divides")
    if arguments.left is not None and not 0 < arguments.left <= arguments.ranks // arguments.per_host:
        parser.error(f"--left {arguments.left} has to be at least 1, and no more than there were before")
    from scripts.bench.provenance import command, machine, write

    found = {"command": command(), **machine(), **checked(arguments)}
    print(write(found, arguments.out))
    print(summary(found))
    sys.exit(0 if sound(found) else 1)


def checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The kills, the faults, and how the killed run ended; after each kill the file has what was found so far."""
    from scripts.bench.provenance import write

    chosen, runs = random.Random(arguments.seed), arguments.runs
    arguments.base = "tiny" if arguments.qat else packed_base(runs)
    whole, killed = runs / "whole", runs / "killed"
    steps = STEPS_PER_KILL * arguments.kills
    first = Ranks(arguments, runs, train(arguments, whole, steps))
    alone = first.ended(START_S + 60 * steps)
    kills = []
    for _ in range(arguments.kills):
        kills.append(one_kill(arguments, killed, steps, chosen))
        write({"unfinished": True, "exit_codes": {"not killed": alone}, "kills": kills}, arguments.out)
    last = argparse.Namespace(
        **{**vars(arguments), "ranks": arguments.left * arguments.per_host if arguments.left else arguments.ranks}
    )
    ended = Ranks(last, runs, ["--resume", str(killed)]).ended(START_S + 60 * steps)
    faults = {name: one_fault(arguments, name) for name in FAULTS} if arguments.engine == "transformers" else {}
    return {
        "ranks": arguments.ranks,
        "ranks_per_launcher": arguments.per_host if arguments.hosts else None,
        "ranks_after_the_last_kill": last.ranks,
        "whole_weights": arguments.qat,
        "kills": kills,
        "exit_codes": {"not killed": alone, "after the last kill": ended},
        "largest_difference": compared(whole, killed) if {*alone, *ended} == {0} else None,
        "faults": faults,
    }


def train(arguments: argparse.Namespace, out: Path, steps: int) -> list[str]:
    """The words after `qerl train` for a new run."""
    repeats = ["rollout.deterministic=true"] if arguments.engine == "vllm" else []
    given = [*SMALL, f"rollout.engine={arguments.engine}", *repeats, *arguments.set]
    words = [word for each in given for word in ("--set", each)]
    recipe = ["--recipe", "qat_tiny" if arguments.qat else "tiny", "--model", arguments.base]
    return [*recipe, "--out", str(out), "--steps", str(steps), *words]


def packed_base(folder: Path) -> str:
    """The embedded model in 4 bits, which is made in `folder`."""
    base = folder / "base"
    command = [sys.executable, "-m", "qerl.cli.main", "quantize", "--model", "tiny", "--out", str(base)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": PATHS})
    return str(base)


class Ranks:
    """The processes of a run, ranks or the launchers of hosts, each with a log of its own in `folder`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, words: Sequence[str], fault: str = "none") -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        count = arguments.ranks // (arguments.per_host if arguments.hosts else 1)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(count)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            launcher, environ = (
                host(rank, count, port, arguments.per_host) if arguments.hosts else alone(rank, count, port)
            )
            command = [*launcher, __file__, AS_RANK, fault if rank == count - 1 else "none", *words]
            own = {"env": os.environ | environ | {"PYTHONPATH": PATHS}, "start_new_session": True}
            with log.open("w") as output:
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, **own))

    def ended(self, seconds: float) -> list[int | None]:
        """The exit codes after at most so many seconds; None for a rank that still ran, which is killed."""
        limit, codes = time.monotonic() + seconds, []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.1, limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for rank in range(len(self.processes)):
            self.kill(rank)
        return codes

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank, and to what it has started."""
        for pid in with_children(self.processes[rank].pid):  # a launcher's ranks have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[rank].wait()

    def errors(self) -> list[list[str]]:
        """The lines of each process that begin with `error:`, without folders of this machine."""
        from scripts.bench.provenance import without_folders

        texts = [without_folders(log.read_text()) for log in self.logs]
        return [[line for line in text.splitlines() if line.startswith("error: ")] for text in texts]


def with_children(pid: int) -> list[int]:
    """A process and all that it has started, as far as that still belongs to it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in with_children(int(child)))]


def alone(rank: int, ranks: int, port: str) -> tuple[list[str], dict[str, str]]:
    """The launcher, which is none, and the variables of a rank."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    return [sys.executable], {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def host(number: int, hosts: int, port: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """torch's launcher as on a host of its own; where there are cards it sees one for each of its ranks."""
    words = ["--nnodes", str(hosts), "--node-rank", str(number), "--nproc-per-node", str(ranks)]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return launcher, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number * ranks, (number + 1) * ranks)))}


def one_kill(arguments: argparse.Namespace, run: Path, steps: int, chosen: random.Random) -> dict[str, Any]:
    """Start or resume the run, kill a rank after its first step, within about two more, and wait for the others."""
    before = steps_of(run)
    ranks = Ranks(arguments, run.parent, ["--resume", str(run)] if before else train(arguments, run, steps))
    victim, share = chosen.randrange(len(ranks.processes)), 2 * chosen.random()
    started = time.monotonic()
    while steps_of(run) <= before and all(process.poll() is None for process in ranks.processes):
        if time.monotonic() - started > START_S:
            break
        time.sleep(0.005)
    time.sleep(share * step_seconds(run))
    at = steps_of(run)
    killed = time.monotonic()
    ranks.kill(victim)
    codes = ranks.ended(LIMIT_S)
    said = [lines for rank, lines in enumerate(ranks.errors()) if rank != victim]
    seconds = round(time.monotonic() - killed, 2)
    return {"rank": victim, "after_step": at, "others_stopped_s": seconds, "exit_codes": codes, "others_said": said}


def one_fault(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """A new run whose last rank fails in its second step."""
    run, reward = arguments.runs / name.replace(" ", "-"), arguments.runs / "reward.py"
    reward.write_text(REWARD)
    words = [*train(arguments, run, 3), "--set", f"rewards=[{{name: '{reward}:length'}}]"]
    ranks = Ranks(arguments, arguments.runs, words, fault=name)
    codes = ranks.ended(START_S)
    return {"exit_codes": codes, "said": ranks.errors(), "steps": steps_of(run)}


def as_rank(fault: str, words: Sequence[str]) -> None:
    """`qerl train WORDS` in this process, which fails by `fault` in its second step."""
    from qerl.cli import main as cli

    sys.argv = ["qerl", "train", *words]
    os.environ[FAULT] = fault  # for the reward, which runs in a process of its own
    if fault != "none":
        import training.step

        original = training.step.loss_inputs
        training.step.loss_inputs = lambda parts, *given: spoilt(fault, parts, original(parts, *given))
    cli.main()


def spoilt(fault: str, parts: Any, inputs: Any) -> Any:
    """The forward pass of a micro-batch, with the fault from the second step on."""
    import dataclasses

    import torch

    if steps_of(parts.run_dir):
        if fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory: asked to")
        if fault == "NaN":
            return dataclasses.replace(inputs, logprobs_B_T=inputs.logprobs_B_T * float("nan"))
    return inputs


def steps_of(run: Path) -> int:
    """Steps in the run's log."""
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def step_seconds(run: Path) -> float:
    """Of the latest step."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if steps_of(run) else []
    return json.loads(lines[-1])["time/step_s"] if lines else 1.0


def compared(one: Path, other: Path) -> dict[str, float]:
    """The largest difference of the two runs' metrics, without times and memory, and of their last weights."""
    from safetensors.torch import load_file

    from qerl.report.metrics import deterministic
    from training.run_dir.log import read_metrics

    rows = [[deterministic(row) for row in read_metrics(run)] for run in (one, other)]
    pairs = [(row[name], again.get(name)) for row, again in zip(*rows, strict=True) for name in row]
    metrics = [abs(a - b) for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    files = [sorted((run / "checkpoints").glob("*"))[-1].rglob("*.safetensors") for run in (one, other)]
    weights = [{name: tensor for file in found for name, tensor in load_file(file).items()} for found in files]
    apart = [(tensor.float() - weights[1][name].float()).abs().max().item() for name, tensor in weights[0].items()]
    return {"metrics": max(metrics), "weights": max(apart), "steps": float(len(rows[1]))}


def sound(found: dict[str, Any]) -> bool:
    """Whether all is as it should be."""
    ranks = found["ranks_per_launcher"] or 1
    kills = all(kill_sound(kill, ranks) for kill in found["kills"])
    faults = all(fault_sound(FAULTS[name], fault, ranks) for name, fault in found["faults"].items())
    return kills and faults and found["largest_difference"] is not None


def kill_sound(kill: dict[str, Any], ranks: int = 1) -> bool:
    """Whether one process was killed and the others stopped in time by themselves, each rank with one line."""
    codes = [code for rank, code in enumerate(kill["exit_codes"]) if rank != kill["rank"]]
    in_time = kill["others_stopped_s"] < LIMIT_S and all(code is not None and code > 0 for code in codes)
    killed = kill["exit_codes"][kill["rank"]] == -signal.SIGKILL
    return killed and in_time and all(len(lines) == ranks for lines in kill["others_said"])


def fault_sound(message: str, fault: dict[str, Any], ranks: int = 1) -> bool:
    """Whether all ranks stopped with one line each, which has the first one's message, after one step."""
    said = all(len(lines) == ranks and all(message in line for line in lines) for lines in fault["said"])
    refused = all(code is not None and code > 0 for code in fault["exit_codes"])
    return said and refused and fault["steps"] == 1


def summary(found: dict[str, Any]) -> str:
    """In a few lines."""
    ranks = found["ranks_per_launcher"] or 1
    good = sum(kill_sound(kill, ranks) for kill in found["kills"])
    slowest = max((kill["others_stopped_s"] for kill in found["kills"]), default=0.0)
    lines = [f"{good} of {len(found['kills'])} kills: the others stopped by themselves, the slowest in {slowest} s"]
    lines.append(f"after them the run ended as one that was not killed, apart by {found['largest_difference']}")
    lines += [f"{name}: {fault_sound(FAULTS[name], fault, ranks)}" for name, fault in found["faults"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
