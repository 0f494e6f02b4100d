"""`qerl eval` with the task `own` and a grader of one's own."""

import json

import pytest

from eval.compare import compare
from eval.result import COMPLETIONS
from eval.run import run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, DataError, RewardError
from qerl.base.program import given
from tests.helpers.eval_factory import build_model, make_run

GRADER = "def grade(completion, answer, level):\n    return level if str(len(completion)) else 0\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def settings(model, tmp_path):
    rows = [{"prompt": f"What is {n}?", "answer": str(n), "level": n / 4} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "grader.py").write_text(GRADER)

    def make(**changes):
        given = {"task": "own", "model": str(model), "data": str(tmp_path / "rows.jsonl"), "max_new_tokens": 4}
        given |= {"grader": str(tmp_path / "grader.py"), "engine": "transformers", "out": tmp_path / "out"}
        return EvalSettings(**{**given, **changes})

    return make


def test_a_grader_gives_the_accuracy_and_the_mean_score(settings, tmp_path):
    result = run_eval(settings())
    assert (result.summary.correct, result.summary.mean_score) == (3, 0.5)
    rows = [json.loads(line) for line in (tmp_path / "out" / COMPLETIONS).read_text().splitlines()]
    assert sorted(row["score"] for row in rows) == [0, 0.25, 0.5, 0.75, 1]
    assert result.to_json()["mean_score"] == 0.5
    of_file = settings(task=str(tmp_path / "rows.jsonl"), data=None, out=tmp_path / "of-file")
    assert run_eval(of_file).summary.mean_score == 0.5


def test_another_grader_is_another_evaluation(settings, tmp_path):
    one = run_eval(settings())
    (tmp_path / "grader.py").write_text("def grade(completion, answer): return True\n")
    other = run_eval(settings(out=tmp_path / "other"))
    assert other.summary.correct == 5
    with pytest.raises(ConfigError, match=r"did not ask the same \(grader"):
        compare(one.out, other.out)


def test_a_module_that_a_grader_imports_is_part_of_the_evaluation(settings, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "grader.py").write_text("import half\ndef grade(completion, answer): return half.VALUE\n")
    (tmp_path / "half.py").write_text("VALUE = 0.5\n")
    assert run_eval(settings()).summary.mean_score == 0.5
    (tmp_path / "half.py").write_text("VALUE = 0.25\n")
    with pytest.raises(CheckpointError, match=r"other settings \(grader"):
        run_eval(settings())
    assert run_eval(settings(overwrite=True)).summary.mean_score == 0.25


def test_an_evaluation_ends_with_the_grader_that_it_began_with(settings, tmp_path):
    source = "from pathlib import Path\ndef grade(completion, answer):\n    {}\n    return 1\n"
    rewrite = "Path(__file__).write_text('def grade(completion, answer): return 0\\n')"
    (tmp_path / "grader.py").write_text(source.format(rewrite))
    assert run_eval(settings(batch_size=1)).summary.correct == 5


def test_a_given_grader_is_said_to_be_known_by_its_text_alone(settings, caplog):
    value = [1]
    with given({"grade": lambda completion: value[0]}, {}):
        run_eval(settings(grader="python:grade"))
        assert "overwrite=True" not in caplog.text
        value[0] = 0
        run_eval(settings(grader="python:grade"))
    assert "of python:grade only its own text is compared" in caplog.text


def test_a_grader_that_fails_names_the_completion(settings, tmp_path):
    (tmp_path / "grader.py").write_text("def grade(completion, answer): return 2 if answer == '3' else 1\n")
    said = r"returned 2\.0, and a grade .* for the completion '.*' of row 4\. A grader.*goes on; where .*`qerl grade`$"
    with pytest.raises(RewardError, match=said):
        run_eval(settings())
    text = "def grade(completions, answer):\n    if '3' in answer: raise KeyError(3)\n    return [1] * len(answer)\n"
    (tmp_path / "grader.py").write_text(text)
    with pytest.raises(RewardError, match=r"raised KeyError: 3 \(grader.py, line 2\) for the completion '.*' of row 4"):
        run_eval(settings())


def test_a_grader_has_the_time_that_is_asked_for(settings, tmp_path):
    (tmp_path / "grader.py").write_text("import time\ndef grade(completion, answer): time.sleep(30)\n")
    with pytest.raises(RewardError, match=r"did not return within 0\.2 s .*within --grader-timeout-s"):
        run_eval(settings(grader_timeout_s=0.2))


def test_a_run_that_had_a_grader_asks_for_it_by_name(settings, model, tmp_path):
    run = make_run(tmp_path / "run", model, task="own", grader="grader.py", source="rows.jsonl")
    with pytest.raises(ConfigError, match=r"was trained with the grader grader\.py.*add --grader grader\.py"):
        run_eval(settings(model=str(run), grader=None))
    assert run_eval(settings(model=str(run))).summary.mean_score == 0.5


def test_text_is_compared_without_a_grader_and_needs_answers(settings, tmp_path):
    assert run_eval(settings(grader=None)).summary.mean_score is None
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?"}\n')
    with pytest.raises(DataError, match="1 of 1 rows have no answer"):
        run_eval(settings(grader=None, out=tmp_path / "other"))
