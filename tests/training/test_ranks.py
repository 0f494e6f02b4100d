"""Runs of two ranks over gloo: the numbers of one, the same again after a kill, and no wait without end."""

import os
import shutil
import signal
import sys
import time

import pytest
import torch

from qerl.base.errors import ConfigError
from qerl.base.parallel import Parallel
from qerl.checkpoint.adapter_file import read_adapter
from qerl.cli.launch import launch, without_option
from qerl.config.recipe import load_recipe, save_config
from qerl.report.read import state_of
from tests.helpers.ranks import alone, command, ranks, rows_of, run, train
from tests.helpers.run_process import ended, forked, go, hold_in, wait_for
from tests.helpers.small_run import numbers, small_config
from training.preflight.plan import check_ranks
from training.ranks import dealt, largest

# The learning rate of the large recipes: the first steps of AdamW move a weight by about that, whatever its gradient
# is, also where that is the rounding of 0.
VARIED = ("rollout.prompts_per_step=3", "run.micro_batch_tokens=40", "optim.learning_rate=1e-5")
CASES = {
    "dynamic, through the quantizer": (
        *("qat.mode=adapter", "rollout.dynamic_sampling.enabled=true", "loss.kl_coef=0.02", "loss.mask_truncated=true"),
        *("validation.every=2", "validation.at_start=false", "validation.task=word_game", "validation.limit=3"),
        *("validation.samples=2", "validation.temperature=1.0", "validation.metric=rewards/digits"),
    ),
    "distillation": ("distill.beta=0.5", "rewards=[{name: accuracy}]", "run.micro_batch_tokens=30"),
    "experts": (  # any, in place of those that the sampler would choose: it matters whose each token's are
        *("loss.num_iterations=2", "loss.type=bnpo", "loss.entropy_coef=0.01", "data.curriculum={}"),
        "loss.mismatch_gate=null",
    ),
}


def recipe(base, folder, *overrides, out="run", steps=4):
    folder.mkdir(exist_ok=True)
    config = small_config(base, folder, "noise.enabled=false", *VARIED, *overrides, steps=steps, out=out)
    save_config(config, folder / f"{out}.yaml")
    return folder / f"{out}.yaml"


COUNTED_AGAIN = ("mismatch/router_changed",)  # a prompt counts in each micro-batch that it is in, which ranks cut


def close(name, one, other):
    """Whether two values of a metric are equal within the rounding of sums in another order."""
    return one == other or one == pytest.approx(other, rel=1e-2 if name in COUNTED_AGAIN else 1e-5, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(base, nvfp4_base, nvfp4_moe, tmp_path, case):
    served = {"dynamic, through the quantizer": base, "experts": nvfp4_moe}.get(case, nvfp4_base)
    overrides = CASES[case]
    steps = 1 if case == "distillation" else 2
    alone(recipe(served, tmp_path, *overrides, out="one", steps=steps))
    assert run(2, recipe(served, tmp_path, *overrides, out="two", steps=steps)) == [0, 0]
    one, two = (numbers(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == steps
    for step, (row, other) in enumerate(zip(one, two, strict=True), 1):
        assert set(row) == set(other)
        apart = {name: (row[name], other[name]) for name in row if not close(name, row[name], other[name])}
        assert not apart, f"step {step}"
    assert all(row["time/reduce_s"] >= 0 for row in rows_of(tmp_path / "two"))
    assert case != "experts" or min(row["mismatch/router_changed"] for row in one) > 0.5
    first, second = (read_adapter(tmp_path / name / "adapter")[0] for name in ("one", "two"))
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=0, atol=1e-6), name


def test_a_killed_rank_ends_the_other_and_the_run_goes_on_with_one_rank(nvfp4_base, tmp_path):
    alone(recipe(nvfp4_base, tmp_path, out="whole"))
    (tmp_path / "killed").mkdir()
    hold_in(tmp_path / "killed", step=3)
    killed = recipe(nvfp4_base, tmp_path / "killed")
    first, second = ranks(2, train, str(killed), str(tmp_path))
    wait_for((tmp_path / "killed" / "held").exists, second)
    second.kill()
    started = time.monotonic()
    go(tmp_path / "killed")
    first.join(60)
    assert first.exitcode == 1
    assert time.monotonic() - started < 60
    assert "error: another rank is gone" in (tmp_path / "rank-0.log").read_text()
    run_dir = tmp_path / "killed" / "run"
    assert (len(rows_of(run_dir)), state_of(run_dir).partition(",")[0]) == (3, "failed: another rank is gone")
    alone(killed, resumed=run_dir)
    for row, other in zip(numbers(tmp_path / "whole"), numbers(run_dir), strict=True):
        assert all(close(name, row[name], other[name]) for name in row)


def test_a_signal_to_one_rank_saves_once_and_stops_both(nvfp4_base, tmp_path):
    hold_in(tmp_path, step=2)
    processes = ranks(2, train, str(recipe(nvfp4_base, tmp_path, "run.save_every=100")), str(tmp_path))
    wait_for((tmp_path / "held").exists, processes[1])
    os.kill(processes[1].pid, signal.SIGTERM)
    wait_for(lambda: "SIGTERM: stopping after this step" in (tmp_path / "rank-1.log").read_text(), processes[1])
    go(tmp_path)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(rows_of(tmp_path / "run")) == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


def test_ranks_with_different_recipes_are_refused(nvfp4_base, tmp_path):
    one, other = recipe(nvfp4_base, tmp_path), recipe(nvfp4_base, tmp_path, "optim.learning_rate=1e-3", out="other")
    processes = ranks(2, train, [str(one), str(other)], str(tmp_path))
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1]
    assert "rank 1 has another recipe than rank 0" in (tmp_path / "rank-0.log").read_text()
    assert not (tmp_path / "run").exists()


def test_hosts_with_different_files_are_refused(nvfp4_base, tmp_path):
    """Each rank finds another file under the same name."""
    started = recipe(nvfp4_base, tmp_path)
    hosts = [tmp_path / f"host-{rank}" for rank in range(2)]
    for host in hosts:
        shutil.copytree(nvfp4_base, host / "base")
        shutil.copy(tmp_path / "rows.jsonl", host / "base")
    changed = hosts[1] / "base" / "rows.jsonl"
    changed.write_text("".join(reversed(changed.read_text().splitlines(True))))
    text = started.read_text().replace(str(nvfp4_base), "base").replace(str(tmp_path / "rows.jsonl"), "base/rows.jsonl")
    started.write_text(text)
    assert run(2, started, tmp_path) == [1, 1]
    for rank in range(2):
        (error,) = (tmp_path / f"rank-{rank}.log").read_text().splitlines()
        assert error.startswith("error: rank 1 has another the rows of the data than rank 0: give all processes the")
    assert not (tmp_path / "run").exists()


CARDS = "#!/bin/sh\n" + "".join(f"echo '{n}, GPU-{n}, NVIDIA H200, 1000, 1000, Disabled'\n" for n in range(2))


NO_MODEL = """
import os
from pathlib import Path
from qerl.cli import evaluate

def measure(settings, parallel):
    cards = os.environ["CUDA_VISIBLE_DEVICES"]
    assert parallel.gather(settings.limit) == [7, 7]
    Path(f"rank-{parallel.rank}").write_text(f"{parallel.size} {parallel.local_rank} {cards}")

evaluate.measure = measure
evaluate.show_results = lambda *given: print("shown")
"""


def test_ranks_are_started_for_each_card(tmp_path):
    """By an evaluation that opens no model. What ranks compute is shown above, and that they take their cards here."""
    (tmp_path / "sitecustomize.py").write_text(NO_MODEL)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(CARDS)
    tool.chmod(0o755)
    environ = {"PYTHONPATH": f"{os.getcwd()}:{tmp_path}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ["eval", "arith", "--model", "tiny", "--gpus", "2", "--limit", "7", "--out", "out"]
    with ended(forked(command, environ, tmp_path, arguments, str(tmp_path / "said"))) as process:
        pass
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2 0 0", "2 1 1"]
    assert said.count("shown") == 1


def test_a_run_is_started_for_each_card(here, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("qerl.cli.train.launch", lambda *given: asked.append(given) or sys.exit(3))
    command = ["train", "--gpus", "2", "--recipe", "tiny", "--set", "model.format=bf16", "--out", str(tmp_path / "run")]
    assert here(*command)[0] == 3
    assert asked == [(2, command)]


def test_more_cards_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr("qerl.cli.launch.visible_cards", lambda: [])
    with pytest.raises(ConfigError, match="--gpus 2 asks for more cards than the 0 that are visible here"):
        launch(2, [])
    assert without_option(["train", "--gpus", "2", "--set", "a=1", "--gpus=4"]) == ["train", "--set", "a=1"]


def test_costly_micro_batches_are_dealt_first_and_the_largest_of_each_metric_counts():
    assert dealt([5, 5, 4, 3, 1], 2) == [[0, 2], [1, 3, 4]]
    assert dealt([7], 3) == [[0], [], []]
    assert dealt([3, 2, 1], 1) == [[0, 1, 2]]
    for size, count in [(2, 3), (3, 2), (4, 16), (1, 5)]:  # shares cover everything once
        shares = [list(range(count))[Parallel(rank, size).span(count)] for rank in range(size)]
        assert [item for share in shares for item in share] == list(range(count))
    assert largest([{"a": 1.0, "b": 2.0}, {"a": 3.0}, {}]) == {"a": 3.0, "b": 2.0}


def test_fewer_groups_than_ranks_and_masters_that_ranks_share_are_refused():
    with pytest.raises(ConfigError, match="prompts_per_step: 1 gives 2 processes less than a group each: write 2"):
        check_ranks(load_recipe("tiny", ["rollout.prompts_per_step=1"]), 2)
    with pytest.raises(ConfigError, match="rows_per_step: 1 gives 2 processes less than a row each: write 2 or more"):
        check_ranks(load_recipe("sft_tiny", ["sft.rows_per_step=1"]), 2)
    for recipe in ("qat_tiny", "sft_tiny"):
        config = load_recipe(recipe, ["qat.forward=masters", "loss.correction.mode=token_truncate"])
        check_ranks(config, 1)
        with pytest.raises(ConfigError, match=r"qat\.forward: masters multiplies by weights .* write --gpus 1"):
            check_ranks(config, 2)
