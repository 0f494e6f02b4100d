"""The whole path on the embedded mixture of experts, command by command, with fewer and shorter steps than tiny_moe."""

import json
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

import training.trainer
from qerl.cli.main import app
from qerl.data.tasks import get_task
from tests.helpers.killed import killed_in
from tests.helpers.small_run import numbers, same_adapters

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = "checkpoints/tiny_experts-NVFP4A16"
SMALLER = (
    *("rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_new_tokens=12", "loss.mask_truncated=false"),
    *("noise.num_stages=3", "run.save_every=1", "optim.warmup_ratio=0", "data.source=rows.jsonl"),
)
EVAL = ("--limit", "12", "--max-new-tokens", "12")


def qerl(*words, typed=None):
    done = CliRunner().invoke(app, [*map(str, words)], input=typed, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def train(out, *values, steps=3):
    given = [word for value in (*SMALLER, *values) for word in ("--set", value)]
    return qerl("train", "--recipe", "tiny_moe", "--steps", steps, "--out", out, *given)


def answers(evaluation):
    rows = map(json.loads, (Path(evaluation) / "completions.jsonl").read_text().splitlines())
    return {row["row"]: row["completion"] for row in rows}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder, with the packed model and rows to train on."""
    folder = tmp_path_factory.mktemp("path")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows = islice(get_task("arith").generate("train"), 48)
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "112 quantized" in qerl("quantize", "--model", "tiny_experts")
        yield folder


@pytest.fixture(scope="module")
def run(place):
    train("runs/moe")
    return Path("runs/moe")


@pytest.fixture(scope="module")
def after(run):
    """The evaluation of the run."""
    qerl("eval", "arith", "--model", run, *EVAL, "--out", run / "eval" / "after")
    return run / "eval" / "after"


def test_the_plan_counts_the_experts_that_a_token_meets(place):
    planned = qerl("plan", "--recipe", "tiny_moe", "--gpu", "24")
    assert "2 of 8 experts in 4 layers, with adapters of rank 16 on experts, with shared outer factors" in planned


def test_a_killed_run_resumes_to_the_same_bits(run):
    killed = Path("runs/killed")
    with killed_in(training.trainer.QerlTrainer, "loss_of", 2):
        train(killed)
    assert len(numbers(killed)) == 1
    qerl("train", "--resume", killed)
    assert numbers(killed) == numbers(run)
    assert same_adapters(killed / "adapter", run / "adapter")


@pytest.mark.parametrize("kind", ["per_expert", "none"])
def test_other_adapters_train_evaluate_and_merge(run, kind):
    out = f"runs/{kind}"
    train(out, f"adapter.experts={kind}", "noise.enabled=false", steps=1)
    qerl("merge", "--adapter", out, "--to", "bf16", "--prompt-count", "0")
    qerl("eval", "arith", "--model", f"merged/{kind}-bf16", *EVAL, "--out", f"evals/{kind}")
    assert len(answers(f"evals/{kind}")) == 12


def test_an_evaluation_is_compared_and_reported(run, after):
    qerl("eval", "arith", "--model", BASE, *EVAL, "--out", "evals/before")
    assert "12; first ahead on" in qerl("compare", "evals/before", after)
    said = qerl("report", run, "--before", "evals/before", "--after", after)
    assert "experts chosen otherwise" in said
    assert "tiny_experts" in (run / "report.html").read_text()


@pytest.mark.parametrize(("to", "same"), [("adapter", 12), ("bf16", 11), ("nvfp4", 6)])
def test_what_is_merged_answers_as_the_run_does(run, after, to, same):
    """Rounding to 16 bits may change a greedy answer, and rounding to 4 bits changes several."""
    qerl("merge", "--adapter", run, "--to", to, "--prompt-count", "0", "--out", f"merged/{to}")
    qerl("eval", "arith", "--model", f"merged/{to}", *EVAL, "--out", f"evals/{to}")
    own, merged = answers(after), answers(f"evals/{to}")
    assert sum(own[row] == merged[row] for row in own) >= same


def test_a_conversation_with_the_run_and_with_its_folder_of_pefts(run):
    qerl("merge", "--adapter", run, "--to", "adapter", "--out", "merged/talks")
    question = "Anna has 4 apples and buys 3 more. How many apples does Anna have?\n"
    greedy = ("--temperature", "0", "--max-new-tokens", "12")
    own, merged = (qerl("chat", "--model", model, *greedy, typed=question) for model in (run, "merged/talks"))
    assert own.strip()
    assert own == merged


def test_doctor_passes(place):
    assert json.loads(qerl("doctor", "--json"))
