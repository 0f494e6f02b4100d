"""The queue of scripts/study_noise.py: which job comes next, the processes that run, and the results so far."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from study_arms import ARMS, Job, JobSettings

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL = 2500  # characters of a failed job's log that the results keep
POLL_S = 0.5


class Study:
    """The jobs of one study, what is known of them, and the processes that run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.started = args, args.work.resolve(), time.monotonic()
        overrides = list(args.set)
        if args.engine == "vllm":
            overrides.append(f"rollout.memory={args.memory_gib}")
        self.settings = JobSettings(
            args.steps, args.engine, tuple(overrides), args.test_rows, args.validation_rows, task=args.task
        )
        self.results: dict = {"settings": self._facts(), "machine": {}, "runs": {}, "failed": {}}
        self.running: dict[str, tuple[Job, subprocess.Popen, float]] = {}
        self.durations: list[float] = []
        self.warm = {"bf16", "nvfp4"} if args.engine == "transformers" else set()
        for folder in ("jobs", "runs", "evals", "cache"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        if args.merge is not None:
            self._merge(json.loads(args.merge.read_text(encoding="utf-8")))
        for path in (self.work / "jobs").glob("*.json"):
            if not path.name.endswith(".spec.json"):
                self.results["runs"].setdefault(path.stem, json.loads(path.read_text(encoding="utf-8")))

    def _facts(self) -> dict:
        chosen = {name: getattr(self.args, name) for name in ("rates", "seeds", "arms", "sweep_seed")}
        return json.loads(json.dumps(asdict(self.settings) | chosen))

    def _merge(self, earlier: dict) -> None:
        same = ("steps", "test_rows", "validation_rows")
        if differing := [name for name in same if earlier["settings"][name] != self.results["settings"][name]]:
            raise SystemExit(
                f"--merge {self.args.merge} has other {', '.join(differing)}: give the same, or no --merge"
            )
        self.results["runs"] |= earlier["runs"]
        print(f"{len(earlier['runs'])} runs taken from {self.args.merge}", flush=True)

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
        """The bases as folders of the work directory."""
        if not (self.work / "bf16").exists():
            (self.work / "bf16").symlink_to(self.args.base.resolve(), target_is_directory=True)
        bases = {ARMS[arm].base for arm in self.args.arms}
        if "nvfp4" in bases and not (self.work / "nvfp4").exists():
            command = ["quantize", "--model", str(self.args.base.resolve()), "--out", str(self.work / "nvfp4")]
            subprocess.run([sys.executable, "-m", "qerl.cli", *command], cwd=self.work, env=environment(), check=True)
        if "nf4" in bases and not (self.work / "nf4").exists():
            from study_nf4 import write_nf4_twin

            write_nf4_twin(self.args.base.resolve(), self.work / "nf4")
        self.results["machine"] = machine()
        print(f"{self.elapsed():.0f} s: bases are ready", flush=True)

    def step(self) -> bool:
        """Collect what has ended, start what fits; False when nothing is left to do or to wait for."""
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
        """Jobs still to start, in order: bases, the sweep, then the arms whose sweep is over."""
        args, known = self.args, {*self.results["runs"], *self.results["failed"], *self.running}
        firsts: dict[str, str] = {}
        for arm in args.arms:
            firsts.setdefault(ARMS[arm].base, arm)
        jobs = [Job(arm, None, 0, "base") for arm in firsts.values()]
        if args.every_rate:
            jobs += [Job(arm, rate, s, "final") for s in args.seeds for rate in args.rates for arm in args.arms]
            return [job for job in jobs if job.key not in known]
        sweep = [Job(arm, rate, args.sweep_seed, "sweep") for rate in args.rates for arm in args.arms]
        jobs += sweep
        done = {*self.results["runs"], *self.results["failed"]}
        rates = {arm: best_rate(self.results["runs"], arm) for arm in args.arms}
        over = [arm for arm in args.arms if all(job.key in done for job in sweep if job.arm == arm)]
        jobs += [Job(arm, rates[arm], seed, "final") for seed in args.seeds for arm in over if rates[arm] is not None]
        return [job for job in jobs if job.key not in known]

    def may_start(self, job: Job) -> bool:
        """Whether there is time for it, by what the others took, and the caches of its format are filled."""
        if job.rate is None:
            return True
        expected = sorted(self.durations)[len(self.durations) // 2] if self.durations else 0.0
        format = ARMS[job.arm].format
        leads = not any(ARMS[other.arm].format == format and other.rate for other, _, _ in self.running.values())
        return self.elapsed() + expected <= 60 * self.args.minutes and (format in self.warm or leads)

    def note_warm(self) -> None:
        """A format whose run has written a step has filled its caches."""
        for job, _, _ in self.running.values():
            metrics = self.work / "runs" / job.key / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size:
                self.warm.add(ARMS[job.arm].format)

    def launch(self, job: Job) -> None:
        spec, out = self.work / "jobs" / f"{job.key}.spec.json", self.work / "jobs" / f"{job.key}.json"
        given = {"job": asdict(job), "settings": asdict(self.settings), "work": str(self.work)}
        spec.write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, str(ROOT / "scripts" / "study_noise.py"), "job", str(spec), str(out)]
        cache = self.work / "cache" / ARMS[job.arm].format
        with (self.work / "jobs" / f"{job.key}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=self.work, env=environment(cache), stdout=log, stderr=log)
        self.running[job.key] = (job, process, time.monotonic())
        print(f"{self.elapsed():.0f} s: started {job.key}", flush=True)

    def collect(self, key: str) -> None:
        job, process, started = self.running.pop(key)
        seconds, out = time.monotonic() - started, self.work / "jobs" / f"{key}.json"
        if process.returncode == 0 and out.exists():
            row = json.loads(out.read_text(encoding="utf-8"))
            self.results["runs"][key] = row | {"seconds": row["seconds"] | {"process": round(seconds, 1)}}
            if job.rate is not None:
                self.durations.append(seconds)
                self.warm.add(ARMS[job.arm].format)
        else:
            log = (self.work / "jobs" / f"{key}.log").read_text(encoding="utf-8", errors="replace")
            self.results["failed"][key] = {"exit": process.returncode, "log": log[-LOG_TAIL:]}
        print(
            f"{self.elapsed():.0f} s: ended {key}, exit {process.returncode}, {summary(self.results, key)}", flush=True
        )
        self.write()

    def write(self) -> None:
        """The results so far, whole or not at all."""
        out = self.args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(self.results) + "\n", encoding="utf-8")
        partial.rename(out)

    def elapsed(self) -> float:
        return time.monotonic() - self.started


def best_rate(runs: dict[str, dict], arm: str) -> float | None:
    """The rate of the arm's sweep with the most right validation answers, the smaller of equals; None without a run."""
    swept = [row for row in runs.values() if row["arm"] == arm and row["phase"] == "sweep"]
    return max(swept, key=lambda row: (row["validation"].count("1"), -row["rate"]))["rate"] if swept else None


def environment(cache: Path | None = None) -> dict[str, str]:
    """Of a job: this checkout, one thread, and the caches of its format."""
    own = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    own |= {"TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    if cache is not None:
        names = {"VLLM_CACHE_ROOT": "vllm", "HUMMING_CACHE_DIR": "humming", "TRITON_CACHE_DIR": "triton"}
        own |= {variable: str(cache / name) for variable, name in names.items()}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    return {**os.environ, **own}


def machine() -> dict:
    """The card and the versions."""
    import torch

    from training.run import versions

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
    return f"{curve}test {row['test'].count('1') / len(row['test']):.3f}, {row['seconds']} s"
