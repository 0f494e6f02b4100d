"""scripts/bench/bench_sft.py: the rows are the same for all, and ours and TRL's trainer run on a CPU."""

import argparse

import bench_sft
import pytest

from qerl.config.recipe import load_recipe

SMALL = ("--steps", "2", "--rows", "4", "--median", "16", "--longest", "32", "--prompt-tokens", "8", "--rank", "4")


def asked(model, *more):
    parser = argparse.ArgumentParser()
    bench_sft.add_options(parser)
    return parser.parse_args(["--model", str(model), *SMALL, *more])


def test_the_recipe_of_the_workload_loads_and_the_rows_are_its_own():
    arguments = asked("somewhere")
    config = load_recipe("sft_7b", bench_sft.overrides(arguments))
    assert (config.sft.rows_per_step, config.adapter.rank, config.validation.every) == (4, 4, None)
    rows = bench_sft.rows(arguments, 100)
    assert rows == bench_sft.rows(arguments, 100)
    assert len(rows) == 8
    assert all(16 <= sum(label >= 0 for label in row["labels"]) <= 32 for row in rows)
    assert all(row["labels"][:8] == [-100] * 8 and row["labels"][8:] == row["input_ids"][8:] for row in rows)


class FakeTrainer:
    """A trainer that logs no tokens, as Unsloth's; two steps of two packed rows, and a row that is left."""

    args = argparse.Namespace(per_device_train_batch_size=1, gradient_accumulation_steps=2)
    state = argparse.Namespace(log_history=[{"loss": 1.0}])

    def __init__(self):
        self.train_dataset = [{"input_ids": [0] * length} for length in (10, 8, 9, 7, 100)]

    def add_callback(self, callback):
        self.callback = callback

    def train(self):
        for _ in range(2):
            self.callback.on_step_begin()
            self.callback.on_step_end()


def test_tokens_are_counted_where_the_trainer_logs_none():
    assert [step["tokens"] for step in bench_sft.timed(FakeTrainer())] == [17, 17]


@pytest.mark.usefixtures("one_thread")
def test_ours_and_that_of_trl_see_the_same_tokens(base, tmp_path):
    settings = ("--set", "model.format=bf16", "--set", "run.micro_batch_tokens=128")
    ours = bench_sft.by_qerl(asked(base, *settings), tmp_path / "qerl")
    theirs = bench_sft.by_trl(asked(base, "--bits", "16", "--micro-batch", "2"), tmp_path / "trl")
    assert (theirs["attention"], theirs["packing"]) == ("sdpa", False)
    totals = [sum(step["tokens"] for step in found["steps"]) for found in (ours, theirs)]
    assert totals[0] == pytest.approx(totals[1])
    assert all(step["step_s"] > 0 for found in (ours, theirs) for step in found["steps"])
