"""Commands on a card, each in a separate process: a killed run, dynamic sampling, evaluation, memory, report, merge.

All last passed on an H200 on 2026-11-22, vLLM 0.25.1. To run the same tests on a CPU with the other engine:

    QERL_TEST_ENGINE=transformers python -m pytest -n0 -m gpu tests/qerl/cli/test_cli_gpu.py

One run of the embedded model has the card to itself, because its memory is measured. The commands after it run side by
side, each within MEMORY_GIB.
"""

import json
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from qerl.checkpoint.adapter_file import read_adapter
from qerl.data.examples import load_examples
from qerl.report.metrics import deterministic
from tests.helpers.cli_shell import Shell
from tests.helpers.either_engine import ENGINE, ON_CARD, marks
from training.run_dir.checkpoint import checkpoint_path, checkpoint_step, checkpoints
from training.run_dir.log import read_metrics

pytestmark = marks(400)
GIB = 2**30
MEMORY_GIB = 8  # per engine, as several are open at once

STEPS, SAVE_EVERY, KILL_AFTER, PROMPTS, GROUP = 6, 2, 3, 8, 8
SETTINGS = [
    f"rollout.engine={ENGINE}",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.group_size={GROUP}",
    f"run.save_every={SAVE_EVERY}",
    "run.keep_checkpoints=3",
    "noise.num_stages=3",
    *([f"rollout.memory={MEMORY_GIB}", "rollout.deterministic=true"] if ON_CARD else []),
]
DAPO = [
    "rollout.dynamic_sampling.enabled=true",
    "rewards=[{name: accuracy}, {name: soft_overlong, args: {cache: 16}}]",
    "logging.completions_every=1",
    f"logging.completions_count={PROMPTS * GROUP}",
]
TOKENS, QUESTIONS = 48, 32
EVALUATION = ["--max-new-tokens", TOKENS, "--engine", ENGINE]
EVALUATION += ["--memory", MEMORY_GIB, "--deterministic"] if ON_CARD else []

COMPARED = ("reward", "loss", "grad_norm", "entropy", "mismatch_kl")
# `rollout.deterministic` repeats bits within a process. In another process on the same card, cuBLAS or vLLM's compiler
# may choose other kernels, whose sums differ for some values in the last bit of bfloat16 (2^-9). In the mean over the
# hundreds of tokens of a step, and in the norm of a tensor, that is far below this limit. No sampled token may change:
# one correct answer more or less among 64 changes the reward by 1.6e-2.
RELATIVE_TOLERANCE = 1e-3
# The driver hands out memory in pieces of 2 MiB. The run reads it at the end of each phase, the test at any time. A
# CUDA context, which torch does not count, takes 0.4 GiB or more.
MEMORY_TOLERANCE_GIB = 0.25


def recipe(*more):
    return ["--recipe", "tiny", *(part for setting in [*SETTINGS, *more] for part in ("--set", setting))]


def train(out, *more):
    return ["train", "--steps", STEPS, "--out", out, *recipe(*more)]


def taken_gib():
    """The memory that is used on the card by all processes, according to the driver; 0 without a card."""
    if not ON_CARD:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@dataclass(frozen=True)
class Whole:
    """The uninterrupted run, and the card's memory while it ran, as this process saw it."""

    shell: Shell
    run: Path
    before_gib: float
    peak_gib: float  # from the creation of its folder, when the engine is open, to its end


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("cli"))
    shell.run("quantize", "quantize", "--model", "tiny", "--device", "cpu")
    run, before, peak = shell.folder / "whole", taken_gib(), 0.0
    process = shell.begin("train", *train("whole"))
    deadline = time.monotonic() + 240
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists():
                peak = max(peak, taken_gib())
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == 0, shell.tail("train")
    return Whole(shell, run, before, peak)


@dataclass(frozen=True)
class Resumed:
    run: Path
    killed_at: int  # steps in metrics.jsonl when it was killed
    checkpoint: int  # the newest one at that time


def kill_and_resume(shell):
    run = shell.folder / "killed"
    process = shell.begin("killed", *train("killed"))
    deadline = time.monotonic() + 200
    while lines(run / "metrics.jsonl") < KILL_AFTER and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, shell.tail("killed")
    killed = Resumed(run, lines(run / "metrics.jsonl"), checkpoint_step(checkpoints(run)[-1]))
    shell.run("resume", "train", "--resume", run)
    return killed


def evaluate(shell, rows, out, *model):
    return shell.run(out, "eval", rows, *EVALUATION, "--out", out, *model)


@pytest.fixture(scope="session")
def beside(whole):
    """The commands that run side by side after the first run: name -> its finished future."""
    shell, rows = whole.shell, whole.shell.folder / "rows.jsonl"
    examples, _ = load_examples("arith", split="test", limit=QUESTIONS)
    written = [{"question": row.question, "answer": f"Counting gives it.\n#### {row.answer}"} for row in examples]
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    alone = ("--model", whole.run, "--adapter", checkpoint_path(whole.run, 4))
    with ThreadPoolExecutor(3) as pool:
        futures: dict[str, Future] = {
            "resumed": pool.submit(kill_and_resume, shell),
            "evals": pool.submit(evaluate, shell, rows, "evals", "--run", whole.run, "--checkpoints", "all"),
            "dapo": pool.submit(shell.run, "dapo", *train("dapo", *DAPO)),
        }
        wait([futures["evals"]])  # the next engine has the same shapes, for which kernels are compiled then
        futures["alone"] = pool.submit(evaluate, shell, rows, "alone", *alone)
        wait(futures.values())
    return futures


def relative(one, other):
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def largest_differences(one_rows, other_rows):
    """The largest relative difference of each compared metric over the steps."""
    pairs = [*zip(one_rows, other_rows, strict=True)]
    return {key: max(relative(one[key], other[key]) for one, other in pairs) for key in COMPARED}


def adapter_difference(one, other):
    """The largest norm of the difference of two tensors, relative to the norm of the tensor."""
    first, second = read_adapter(one)[0], read_adapter(other)[0]
    assert set(first) == set(second)
    return torch.stack([(first[name] - second[name]).norm() / second[name].norm() for name in first]).max().item()


def test_a_killed_run_resumes_to_the_numbers_of_the_uninterrupted_one(whole, beside, record_property):
    resumed = beside["resumed"].result()
    assert KILL_AFTER <= resumed.killed_at < STEPS
    assert SAVE_EVERY <= resumed.checkpoint < STEPS
    rows, again = read_metrics(whole.run), read_metrics(resumed.run)
    assert [row["step"] for row in again] == [*range(1, STEPS + 1)]
    assert [row["noise/sigma"] for row in again] == [row["noise/sigma"] for row in rows]
    found = largest_differences(again, rows) | {
        "adapter": adapter_difference(resumed.run / "adapter", whole.run / "adapter")
    }
    record_property("relative_differences", found)
    pairs = zip(again, rows, strict=True)
    other_bits = [one["step"] for one, other in pairs if deterministic(one) != deterministic(other)]
    record_property("steps_with_other_bits", other_bits)
    assert max(found.values()) < RELATIVE_TOLERANCE, f"{found}; steps with other bits: {other_bits}"
    # for comparison: one step more or less makes a large difference
    assert max(largest_differences(rows[:-1], rows[1:]).values()) > 10 * RELATIVE_TOLERANCE
    assert adapter_difference(checkpoint_path(whole.run, 4), whole.run / "adapter") > 10 * RELATIVE_TOLERANCE


def test_dynamic_sampling_keeps_batches_full_and_counts_what_it_discards(whole, beside):
    said = beside["dapo"].result()
    run = whole.shell.folder / "dapo"
    rows = read_metrics(run)
    assert len(rows) == STEPS
    for step, row in enumerate(rows, start=1):
        samples = [json.loads(line) for line in (run / f"completions/step-{step:06d}.jsonl").open()]
        groups = [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]
        assert len(groups) == PROMPTS
        for group in groups:
            assert len({sample["prompt"] for sample in group}) == 1
            assert len({sum(sample["rewards"].values()) for sample in group}) > 1
        assert row["dynamic_sampling/filled_groups"] == row["groups/zero_variance_share"] == 0
        assert row["dynamic_sampling/sampled_groups"] == PROMPTS + row["dynamic_sampling/discarded_groups"]
        assert (row["dynamic_sampling/discarded_tokens"] > 0) == (row["dynamic_sampling/discarded_groups"] > 0)
        tokens = row["dynamic_sampling/discarded_tokens"] + row["completions/mean_tokens"] * PROMPTS * GROUP
        assert row["speed/rollout_tokens_per_s"] * row["time/rollout_s"] == pytest.approx(tokens)
    total = {key: sum(row[f"dynamic_sampling/{key}_groups"] for row in rows) for key in ("sampled", "discarded")}
    assert total["discarded"] > 0
    assert f"{total['sampled']} were sampled and {total['discarded']} discarded" in said


def evaluation(folder):
    """(content of result.json, rows of completions.jsonl without their times)."""
    rows = [json.loads(line) for line in (folder / "completions.jsonl").open()]
    for row in rows:
        del row["batch_seconds"]
    return json.loads((folder / "result.json").read_text()), rows


def test_checkpoints_are_evaluated_on_one_engine_and_as_each_alone(whole, beside):
    said = beside["evals"].result()
    assert re.findall(r"\bengine (transformers|vllm), ", said) == [ENGINE]
    assert said.count("vllm engine open: ") == ON_CARD
    assert said.count(" tensors are in the engine\n") == 3
    found = {step: evaluation(whole.shell.folder / f"evals/step-{step:06d}") for step in (2, 4, 6)}
    for step, (result, rows) in found.items():
        assert (result["step"], result["questions"], len(rows)) == (step, QUESTIONS, QUESTIONS)
        assert result["engine"]["name"] == ENGINE
        assert result["accuracy"]["value"] == sum(row["correct"] for row in rows) / QUESTIONS > 0
    assert found[2][1] != found[4][1] != found[6][1]  # every adapter has an effect
    beside["alone"].result()
    result, rows = evaluation(whole.shell.folder / "alone")
    assert rows == found[4][1]
    assert result["accuracy"] == found[4][0]["accuracy"]
    assert result["engine"] == found[4][0]["engine"]


def test_the_memory_that_a_run_logs_is_the_drivers_and_the_plan_is_printed(whole, record_property):
    rows = read_metrics(whole.run)
    assert [("memory/peak_gib" in row) for row in rows] == [ON_CARD] * STEPS
    logged = max(row.get("memory/peak_gib", 0.0) for row in rows)
    assert logged == pytest.approx(whole.peak_gib, abs=MEMORY_TOLERANCE_GIB)
    assert (logged > whole.before_gib + 2 * MEMORY_TOLERANCE_GIB) == ON_CARD
    plan = whole.shell.run("plan", "plan", *recipe())
    rollout, training = map(float, re.search(r"^ *all +([\d.]+) +([\d.]+)", plan, re.MULTILINE).groups())
    assert min(rollout, training) > 0
    assert re.search(r"^Memory on ", plan, re.MULTILINE)
    record_property("logged_gib", [row.get("memory/peak_gib") for row in rows])
    record_property("watched_gib", {"before": whole.before_gib, "peak": whole.peak_gib})
    record_property("planned_gib", {"rollout": rollout, "training": training})


def test_the_run_is_reported(whole):
    whole.shell.run("report", "report", whole.run)
    page = (whole.run / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert ("memory/peak_gib" in page or "GiB" in page) == ON_CARD
    assert (whole.run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("beside")  # they have to be finished, since its engines use all of the card
def test_the_run_is_merged_to_nvfp4(whole):
    said = whole.shell.run(
        "merge", "merge", "--adapter", whole.run, "--to", "nvfp4", "--prompt-count", 4, "--out", "merged"
    )
    report = json.loads((whole.shell.folder / "merged" / "merge_report.json").read_text())
    assert report["effect"]["prompts"] == 4
    assert "vllm serve" in said
