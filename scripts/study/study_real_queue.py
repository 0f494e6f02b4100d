"""The queue of scripts/study/study_real.py: processes that share the card, the runs still to do, the results so far."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from study_real_arms import ARMS, ROOT, Job, Settings, read_results

POLL_S = 0.3
PORT_TAKEN = "EADDRINUSE"  # vLLM 0.25.1 finds a free port and opens it later, when another process may have it


@dataclass
class Worker:
    """A process that does one run after another, and what it does now."""

    process: subprocess.Popen
    job: Job | None = None
    started: float = 0.0


class Queue:
    """The jobs of one call, over as many processes as may run at the same time."""

    def __init__(self, args: argparse.Namespace, settings: Settings, jobs: Sequence[Job]) -> None:
        """Takes over the results in args.out. Exits if they were made with other settings."""
        self.args, self.settings, self.work = args, settings, args.work.resolve()
        self.began = time.monotonic()
        self.results = read_results(args.out)
        ours, theirs = asdict(settings), self.results["settings"] or asdict(settings)
        if differing := [name for name in ours if theirs.get(name) != ours[name]]:
            raise SystemExit(f"{args.out} was made with other {', '.join(differing)}: give the same, or another --out")
        self.results |= {"settings": ours, "machine": machine(), "failed": {}}
        self.waiting = [job for job in jobs if job.key not in self.results["runs"]]
        self.measured = {row["arm"] for row in self.results["runs"].values() if row.get("before")}
        self.warm = set() if settings.engine == "vllm" else {arm.caches for arm in ARMS.values()}
        self.workers: list[Worker] = []
        self.durations: list[float] = []
        self.again: set[Job] = set()
        for folder in ("jobs", "runs", "cache"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        print(f"{len(self.results['runs'])} runs are done, {len(self.waiting)} are to do", flush=True)

    def run(self) -> int:
        """Do the jobs until they are done or the time is over; returns the number of those that failed."""
        try:
            for _ in range(min(self.args.parallel, len(self.waiting))):
                self.start_worker()  # all of them import at the same time
            while self.step():
                time.sleep(POLL_S)
        finally:
            for worker in self.workers:
                worker.process.terminate()
            for worker in self.workers:
                worker.process.wait()
            self.write()
        return len(self.results["failed"])

    def step(self) -> bool:
        """Collect what has ended and hand out what may start; False when nothing is left to do or to wait for."""
        for worker in [worker for worker in self.workers if worker.job is not None]:
            self.collect(worker)
        self.workers = [worker for worker in self.workers if worker.process.poll() is None]
        self.note_warm()
        running = [worker.job.key for worker in self.workers if worker.job is not None]
        if self.elapsed() > 60 * self.args.minutes:
            if running:
                print(f"out of time, ended: {', '.join(running)}", flush=True)
            return False
        for job in [job for job in self.waiting if self.may_start(job)]:
            worker = self.free_worker()
            if worker is None:
                break
            if self.may_start(job):  # another one of its kind may just have begun
                self.hand(worker, job)
        return bool(self.running() or any(self.in_time(job) for job in self.waiting))

    def may_start(self, job: Job) -> bool:
        """Whether the time suffices, and its graphs are compiled or it is the one to compile them."""
        caches = ARMS[job.arm].caches
        leads = not any(ARMS[other.arm].caches == caches for other in self.running())
        return self.in_time(job) and (caches in self.warm or leads)

    def in_time(self, job: Job) -> bool:
        """Whether a run that starts now would end in time, if it takes as long as the others."""
        expected = median(self.durations) if self.durations else 0.0
        return self.elapsed() + expected <= 60 * self.args.minutes

    def running(self) -> list[Job]:
        """The jobs that are being done."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def free_worker(self) -> Worker | None:
        """A process without a job, a new one if there may be one more."""
        idle = next((worker for worker in self.workers if worker.job is None), None)
        if idle is None and len(self.workers) < self.args.parallel:
            idle = self.start_worker()
        return idle

    def start_worker(self) -> Worker:
        """Start one more process."""
        command = [sys.executable, str(Path(__file__).with_name("study_real_job.py"))]
        with (self.work / "jobs" / "workers.log").open("a") as log:
            given = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "text": True}
            process = subprocess.Popen(command, cwd=ROOT, env=environment(self.work / "cache"), **given)
        self.workers.append(Worker(process))
        return self.workers[-1]

    def hand(self, worker: Worker, job: Job) -> None:
        """Let a process begin with a job."""
        out, before = self.out_of(job), job.arm not in self.measured
        out.unlink(missing_ok=True)
        given = {"job": asdict(job), "settings": asdict(self.settings), "work": str(self.work), "out": str(out)}
        try:
            worker.process.stdin.write(json.dumps(given | {"measure_before": before}) + "\n")
            worker.process.stdin.flush()
        except BrokenPipeError:  # it has ended since it was looked at, and the job stays among those that wait
            worker.process.wait()
            return
        worker.job, worker.started = job, time.monotonic()
        self.waiting.remove(job)
        self.measured.add(job.arm)
        print(f"{self.elapsed():.0f} s: started {job.key}", flush=True)

    def collect(self, worker: Worker) -> None:
        """Take the row of a worker's job, if it has ended."""
        job, out = worker.job, self.out_of(worker.job)
        ended = worker.process.poll() is not None  # asked first: it writes before it ends
        if not out.exists() and not ended:
            return
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"error": "its process was killed"}
        worker.job = None
        if row := found.get("row"):
            self.results["runs"][job.key] = row
            self.durations.append(time.monotonic() - worker.started)
            self.warm.add(ARMS[job.arm].caches)
        else:
            if PORT_TAKEN in found["error"] and job not in self.again:
                self.again.add(job)
                self.waiting.insert(0, job)
            else:
                self.results["failed"][job.key] = last_line(found["error"])
            self.measured.discard(job.arm)
            worker.process.terminate()  # it is ending anyway, and gets no other job
            self.workers.remove(worker)
        print(f"{self.elapsed():.0f} s: ended {job.key}, {summary(found)}", flush=True)
        self.write()

    def note_warm(self) -> None:
        """Note the graphs that are compiled: those of runs that have written a step."""
        for job in self.running():
            metrics = self.work / "runs" / job.key / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size:
                self.warm.add(ARMS[job.arm].caches)

    def out_of(self, job: Job) -> Path:
        return self.work / "jobs" / f"{job.key}.json"

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def write(self) -> None:
        """Write the results so far, by a rename, so that the file is never incomplete."""
        out = self.args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(self.results) + "\n", encoding="utf-8")
        partial.rename(out)


def environment(cache: Path) -> dict[str, str]:
    """The environment of a worker: this checkout, one thread, and caches that the runs of a study share."""
    own = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    own |= {"TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4", "HF_HUB_OFFLINE": "1"}
    names = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {**os.environ, **own, **{variable: str(cache / name) for variable, name in names.items()}}


def machine() -> dict[str, Any]:
    """The card, the number of cores and the versions of packages."""
    import torch

    from training.run_dir.inputs import versions

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"device": card, "cores": os.cpu_count(), "versions": versions()}


def last_line(error: str) -> str:
    """What was raised, of a traceback that the job's log has as a whole."""
    return error.strip().splitlines()[-1]


def summary(found: dict[str, Any]) -> str:
    """One line on how a job went."""
    row = found.get("row")
    if row is None:
        return f"failed: {last_line(found['error'])}"
    rewards, bits = row["steps"]["reward"], row["after"]["test"]
    tenth = max(1, len(rewards) // 10)
    begin, end = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    return f"{row['seconds']:.0f} s, reward {begin:.3f} to {end:.3f}, test {bits.count('1') / len(bits):.3f}"
