"""Evaluations of two ranks over gloo: what one process writes, also if another number of ranks continues it."""

import json
import shutil

import pytest

from eval.result import COMPLETIONS, RESULT
from eval.run import run_eval
from eval.settings import EvalSettings
from qerl.base.errors import ConfigError
from qerl.cli.evaluate import evaluate as evaluate_command
from tests.helpers.eval_factory import build_model
from tests.helpers.ranks import evaluate, ranks


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    rows = [{"question": f"What is {n} times {n * n + 1}?", "answer": str(n)} for n in range(1, 8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = build_model(folder / "base")
    settings = {"task": "gsm8k", "model": str(model), "data": str(folder / "rows.jsonl"), "engine": "transformers"}
    return {**settings, "max_new_tokens": 8, "batch_size": 3}


def written(folder):
    """Rows and result, without times and places."""
    rows = [json.loads(line) for line in (folder / COMPLETIONS).read_text().splitlines()]
    result = json.loads((folder / RESULT).read_text())
    rows = [{key: value for key, value in row.items() if key != "batch_seconds"} for row in rows]
    return rows, {key: value for key, value in result.items() if key in ("accuracy", "identity", "sampling", "engine")}


def of_two(given, output):
    """The exit codes of two ranks."""
    processes = ranks(2, evaluate, given, str(output))
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.mark.usefixtures("one_thread")
def test_two_ranks_continue_what_one_process_began_as_it_would(given, tmp_path):
    run_eval(EvalSettings(**given, out=tmp_path / "one"))
    begun = shutil.copytree(tmp_path / "one", tmp_path / "begun")
    (begun / RESULT).unlink()
    lines = (begun / COMPLETIONS).read_text().splitlines(keepends=True)
    (begun / COMPLETIONS).write_text("".join(lines[:4]))  # one batch, and a part of the next
    assert of_two({**given, "out": begun}, tmp_path) == [0, 0], (tmp_path / "rank-0.log").read_text()
    assert written(begun) == written(tmp_path / "one")


def test_a_grader_that_raises_on_one_rank_is_the_message_of_both(given, tmp_path):
    (tmp_path / "grader.py").write_text(
        "def grade(completion, question, **columns):\n    assert '7 times' not in question, 'seven'\n    return True\n"
    )
    asked = {**given, "batch_size": 7, "grader": f"{tmp_path / 'grader.py'}:grade", "out": tmp_path / "out"}
    assert of_two(asked, tmp_path) == [1, 1]
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all("seven" in text for text in said), said
    assert sum("failed: " in text for text in said) == 1
    assert not (tmp_path / "out").exists()


def test_one_card_and_several_are_not_asked_for_together(given):
    with pytest.raises(ConfigError, match="--gpu names one card and --gpus asks for several"):
        evaluate_command(EvalSettings(**given), gpu=0, gpus=2)
    with pytest.raises(ConfigError, match="--gpus does not go with --suite lighteval"):
        evaluate_command(EvalSettings(task="gsm8k|0", model="tiny", suite="lighteval"), gpus=2)
