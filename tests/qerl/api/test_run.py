"""What `qerl.Run` reads of a folder."""

import json

import pytest

import qerl


@pytest.fixture
def run(tmp_path):
    (tmp_path / "completions").mkdir()
    (tmp_path / "config.yaml").write_text("model: {}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.7}\n{"step": 3, "re')
    return qerl.Run(tmp_path)


@pytest.mark.parametrize("written", ["a\u2028b}", "a\x85b", "a\x0bb\x1c", "\u2029}\u2028{"])
def test_what_a_model_writes_may_hold_any_end_of_a_line(run, written):
    row = {"prompt": "p", "completion": written, "rewards": {"r": 1.0}}
    (run.path / "completions" / "step-000001.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n" * 2)
    assert run.completions.to_dict("records") == [{"step": 1, "prompt": "p", "completion": written, "r": 1.0}]


def test_no_name_of_a_reward_hides_another_column(run):
    row = {"prompt": "p", "tokens": 4, "rewards": {"tokens": 1.0, "w": 2.0}, "extra": {"prompt": "x", "w": 3}}
    (run.path / "completions" / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = run.completions.to_dict("records")
    assert (found["prompt"], found["extra/prompt"]) == ("p", "x")
    assert (found["tokens"], found["rewards/tokens"]) == (4, 1.0)
    assert (found["w"], found["rewards/w"]) == (3, 2.0)


def test_a_line_that_is_written_now_is_left_out_and_a_damaged_one_is_named(run):
    assert (run.steps, list(run.metrics["reward"])) == (2, [0.5, 0.7])
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st}\n{"step": 3}\n')
    with pytest.raises(qerl.QerlError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        run.metrics  # noqa: B018


@pytest.mark.parametrize(("runs", "metrics"), [(3, ()), ([None], ()), ("here", (3,)), ("here", ([3],))])
def test_what_is_no_run_or_metric_is_one_line(run, runs, metrics):
    with pytest.raises(qerl.QerlError, match=r"(3|None) is not a run|no metric 3; it has reward"):
        qerl.plot(run if runs == "here" else runs, *metrics)
