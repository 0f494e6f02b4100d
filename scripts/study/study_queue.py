"""The queue of the studies: the next jobs, the running processes, and the results so far."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from study_arms import ARMS, Job, JobSettings, check_rows

from qerl import formats

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL = 2500  # characters of a failed job's log that the results keep
POLL_S = 0.5


class Study:
    """The jobs of one study, their results so far, and the running processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.started = args, args.work.resolve(), time.monotonic()
        memory = [f"rollout.memory={args.memory_gib}"] if args.engine == "vllm" else []
        self.settings = JobSettings(
            base=args.base.name,
            task=args.task,
            steps=args.steps,
            engine=args.engine,
            overrides=[*args.set, *memory],
            test_rows=args.test_rows,
            validation_rows=args.validation_rows,
        )
        self.results: dict = {"settings": asdict(self.settings), "machine": {}, "runs": {}, "failed": {}}
        self.running: dict[str, tuple[Job, subprocess.Popen, float]] = {}
        self.durations: list[float] = []
        self.warm = {arm.caches for arm in ARMS.values()} if args.engine == "transformers" else set()
        for folder in ("jobs", "runs", "evals", "cache"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        if args.out.exists():
            self._take(json.loads(args.out.read_text(encoding="utf-8")))

    def _take(self, earlier: dict) -> None:
        """Take over the runs of an earlier call. Exits if that call had other settings."""
        ours, theirs = self.results["settings"], earlier["settings"]
        if differing := [name for name in ours if theirs.get(name) != ours[name]]:
            raise SystemExit(
                f"{self.args.out} was made with other {', '.join(differing)}: give the same, or another --out"
            )
        self.results["runs"] |= earlier["runs"]
        print(f"{len(earlier['runs'])} runs are in {self.args.out}", flush=True)

    def run(self) -> int:
        """Prepare the bases, run the jobs, write the results. Returns the number of jobs that failed."""
        self.prepare()
        try:
            while self.step():
                time.sleep(POLL_S)
        finally:
            for _, process, _ in self.running.values():
                process.terminate()
            for _, process, _ in self.running.values():
                process.wait()
        self.write()
        return len(self.results["failed"])

    def prepare(self) -> None:
        """Make the bases as folders of the work directory. Raises DataError if the task has too few rows."""
        check_rows(self.settings)
        if not (self.work / "bf16").exists():
            (self.work / "bf16").symlink_to(self.args.base.resolve(), target_is_directory=True)
        bases = {ARMS[arm].served for arm in self.args.arms}
        for name in sorted(bases - {"bf16", "nf4"}):
            if (self.work / name).exists():
                continue
            embedded, _, format = name.rpartition("-")
            command = ["quantize", "--model", embedded or str(self.args.base.resolve()), "--out", str(self.work / name)]
            command += [] if format == formats.DEFAULT.name else ["--scheme", format]
            subprocess.run(
                [sys.executable, "-m", "qerl.cli.main", *command], cwd=self.work, env=environment(), check=True
            )
        if "nf4" in bases and not (self.work / "nf4").exists():
            from study_nf4 import write_nf4_twin

            write_nf4_twin(self.args.base.resolve(), self.work / "nf4")
        self.results["machine"] = machine()
        print(f"{self.elapsed():.0f} s: bases are ready", flush=True)

    def step(self) -> bool:
        """Collect jobs that have ended and start others; False when there is nothing left to do or to wait for."""
        for key in [key for key, (_, process, _) in self.running.items() if process.poll() is not None]:
            self.collect(key)
        self.note_warm()
        late = self.elapsed() / 60 > self.args.minutes
        if late and self.running:
            print(f"out of time, ended: {', '.join(self.running)}", flush=True)
        waiting = [] if late else self.waiting()
        while waiting and len(self.running) < self.args.parallel:
            ready = [job for job in waiting if self.may_start(job)]
            if not ready:
                break
            self.launch(ready[0])
            waiting.remove(ready[0])
        return bool(self.running) and not late

    def waiting(self) -> list[Job]:
        """The jobs still to start: first the bases, then seed by seed, so that all arms and rates get equally many."""
        args, known = self.args, {*self.results["runs"], *self.results["failed"], *self.running}
        firsts: dict[str, str] = {}
        for arm in args.arms:
            firsts.setdefault(ARMS[arm].served, arm)
        known_bases = {ARMS[row["arm"]].served for row in self.results["runs"].values() if row["rate"] is None}
        jobs = [Job(arm, None, 0) for base, arm in firsts.items() if base not in known_bases]
        rates = {arm: args.weights_rates if ARMS[arm].way else args.rates for arm in args.arms}
        for seed, index in itertools.product(args.seeds, range(max(map(len, rates.values()), default=0))):
            jobs += [Job(arm, rates[arm][index], seed) for arm in args.arms if index < len(rates[arm])]
        return [job for job in jobs if job.key not in known]

    def may_start(self, job: Job) -> bool:
        """Whether the time suffices, judging by other jobs, and the job's caches are filled."""
        if job.rate is None:
            return True
        expected = sorted(self.durations)[len(self.durations) // 2] if self.durations else 0.0
        caches = ARMS[job.arm].caches
        leads = not any(ARMS[other.arm].caches == caches and other.rate for other, _, _ in self.running.values())
        return self.elapsed() + expected <= 60 * self.args.minutes and (caches in self.warm or leads)

    def note_warm(self) -> None:
        """Note the caches that are filled: those of arms of which a run has written a step."""
        for job, _, _ in self.running.values():
            metrics = self.work / "runs" / job.key / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size:
                self.warm.add(ARMS[job.arm].caches)

    def launch(self, job: Job) -> None:
        spec, out = self.work / "jobs" / f"{job.key}.spec.json", self.work / "jobs" / f"{job.key}.json"
        given = {"job": asdict(job), "settings": asdict(self.settings), "work": str(self.work)}
        spec.write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, str(Path(__file__).with_name("study_noise.py")), "job", str(spec), str(out)]
        cache = self.work / "cache" / ARMS[job.arm].caches
        with (self.work / "jobs" / f"{job.key}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=self.work, env=environment(cache), stdout=log, stderr=log)
        self.running[job.key] = (job, process, time.monotonic())
        print(f"{self.elapsed():.0f} s: started {job.key}", flush=True)

    def collect(self, key: str) -> None:
        job, process, started = self.running.pop(key)
        seconds, out = time.monotonic() - started, self.work / "jobs" / f"{key}.json"
        if process.returncode == 0 and out.exists():
            self.results["runs"][key] = json.loads(out.read_text(encoding="utf-8"))
            if job.rate is not None:
                self.durations.append(seconds)
                self.warm.add(ARMS[job.arm].caches)
        else:
            log = (self.work / "jobs" / f"{key}.log").read_text(encoding="utf-8", errors="replace")
            self.results["failed"][key] = {"exit": process.returncode, "log": log[-LOG_TAIL:]}
        how = f"exit {process.returncode} after {seconds:.0f} s, {summary(self.results, key)}"
        print(f"{self.elapsed():.0f} s: ended {key}, {how}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the results so far, by a rename, so that the file is never incomplete."""
        out = self.args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(self.results) + "\n", encoding="utf-8")
        partial.rename(out)

    def elapsed(self) -> float:
        return time.monotonic() - self.started


def environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a job: this checkout, one thread, and its caches."""
    own = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    own |= {"TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    if cache is not None:
        names = {"VLLM_CACHE_ROOT": "vllm", "HUMMING_CACHE_DIR": "humming", "TRITON_CACHE_DIR": "triton"}
        own |= {variable: str(cache / name) for variable, name in names.items()}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    return {**os.environ, **own}


def machine() -> dict:
    """The card, the number of cores and the versions of packages."""
    import torch

    from training.run_dir.inputs import versions

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"device": card, "cores": os.cpu_count(), "versions": versions()}


def summary(results: dict, key: str) -> str:
    """One line on how a job went."""
    row = results["runs"].get(key)
    if row is None:
        return " ".join(results["failed"][key]["log"].strip().splitlines()[-1:])
    rewards = row.get("steps", {}).get("reward", [])
    tenth = max(1, len(rewards) // 10)
    curve = f"reward {sum(rewards[:tenth]) / tenth:.3f} to {sum(rewards[-tenth:]) / tenth:.3f}, " if rewards else ""
    return f"{curve}test {row['test'].count('1') / len(row['test']):.3f}"
