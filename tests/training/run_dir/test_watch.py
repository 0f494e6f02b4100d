"""Warnings during a run: which metrics cause which warning, and how often it is repeated."""

import json

import pytest
from rich.console import Console

from qerl.report.page import render_page, render_text
from qerl.report.read import read_run
from training.run_dir.log import RunLog
from training.run_dir.watch import COOL_DOWN, WINDOW, Finding, due, findings

GOOD = {
    "reward": 0.5,
    "entropy": 0.4,
    "mismatch_kl": 2e-4,
    "groups/zero_variance_share": 0.3,
    "completions/truncated_share": 0.1,
    "correction/capped_share": 0.01,
    "grades/no_answer_share": 0.1,
}
NO_REWARD = {"reward": 0.0, "groups/zero_variance_share": 1.0}


def rows(*changes, before=()):
    """WINDOW good steps with `before`, then WINDOW steps for each of `changes`."""
    parts = [dict(before), *changes]
    return [{"step": i, **GOOD, **parts[i // WINDOW]} for i in range(WINDOW * len(parts))]


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (NO_REWARD, "reward_zero", "reward has been 0 for 5 steps in a row: completions end"),
        ({"rewards/accuracy": 0.0}, "reward_zero", "accuracy has been 0"),  # although another reward is not 0
        ({"sampled/accuracy": 0.0, "rewards/accuracy": 0.1}, "reward_zero", "accuracy has been 0"),
        (NO_REWARD | {"completions/truncated_share": 0.8}, "reward_zero", "80% of the completions hit the length"),
        (NO_REWARD | {"grades/no_answer_share": 0.9}, "reward_zero", "in 90% of the completions no answer was found"),
        (NO_REWARD | {"grades/refused_share": 0.6}, "reward_zero", "60% of the answers could not be compared"),
        (NO_REWARD | {"rewards/format": 0.0}, "reward_zero", "form that the reward format asks for"),
        ({"groups/zero_variance_share": 1.0}, "no_variance", "(mean reward 0.50)"),
        (
            {"groups/zero_variance_share": 1.0, "reward": None, "completions/unscored_share": 1.0},
            "no_variance",
            "100% of the completions have no reward: every reward function returned None",
        ),
        ({"groups/zero_variance_share": 1.0, "groups/all_right_share": 0.9}, "no_variance", "take harder data"),
        ({"groups/zero_variance_share": 1.0, "groups/all_right_share": 0.1}, "no_variance", "take easier data"),
        ({"completions/truncated_share": 0.5}, "truncated", "50% of the completions"),
        ({"environment/failed_share": 0.2}, "environment_fails", "20% of the episodes"),
        ({"entropy": 0.039}, "entropy_collapse", "from 0.4 to 0.039 nats"),
        ({"entropy": 0.039, "rewards/accuracy": 0.79}, "entropy_collapse", "from 0.4 to 0.039 nats"),
        ({"mismatch_kl": 1.1e-3}, "mismatch_growing", "from 2.0e-04 to 1.1e-03"),
        ({"correction/capped_share": 0.12}, "outside_bounds", "12% of the tokens"),
        ({"correction/masked_share": 0.1}, "outside_bounds", "were masked"),
        ({"dynamic_sampling/informative_share": 0.05}, "few_informative", "only 5.0%"),
    ],
)
def test_metrics_and_their_warnings(changed, kind, said):
    (found,) = findings(rows(changed))
    assert (found.kind, said in found.text) == (kind, True), found.text
    assert not any(finding.kind == kind for finding in findings(rows(changed)[:-1])), "told a step too early"


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rewards/accuracy": 0.01, "reward": 0.0},
        {"groups/zero_variance_share": 0.99},
        {"completions/truncated_share": 0.49},
        {"entropy": 0.041},
        {"entropy": 0.001, "rewards/accuracy": 0.81},  # the model is certain, but right
        {"entropy": None},  # no completion was in the loss
        {"mismatch_kl": 9e-4},  # below 5 times that of the first steps
        {"mismatch_kl": 2e-2, "noise/sigma": 0.01},  # the first steps had less noise
        {"correction/capped_share": 0.09},
        {"dynamic_sampling/informative_share": 0.11},
    ],
)
def test_near_misses_give_no_warning(changed):
    assert findings(rows(changed)) == []


@pytest.mark.parametrize("updates", [1, 2, 16])
def test_many_updates_on_one_rollout_hide_nothing(updates):
    """Only the first update on a rollout has the metrics of the rollout."""
    metrics = {key: GOOD[key] for key in ("entropy", "mismatch_kl")}
    steps = [metrics | (GOOD | NO_REWARD if i % updates == 0 else {}) for i in range(WINDOW * updates)]
    assert [finding.kind for finding in findings(steps)] == ["reward_zero"]
    later = [*steps, *[metrics] * (4 * updates)]  # longer ago than the window is long, so it gives no warning
    assert findings(later) == []


def test_each_warning_comes_once_per_cool_down():
    found = [Finding("truncated", "a"), Finding("no_variance", "b")]
    assert due(found, {"truncated": 10}, 9 + COOL_DOWN) == found[1:]
    assert due(found, {"truncated": 10}, 10 + COOL_DOWN) == found


def test_the_run_shows_writes_and_reports_a_warning(tmp_path):
    console = Console(record=True, width=60, force_terminal=False)
    with RunLog(tmp_path, 20, console) as log:
        for step in range(1, 9):
            log.write_step(step, GOOD | {"reward": 0.0})
    shown = [line for line in console.export_text().splitlines() if line.startswith("warning")]
    assert len(shown) == 1
    assert shown[0].startswith("warning at step 5: the reward has been 0")
    (row,) = map(json.loads, (tmp_path / "warnings.jsonl").read_text().splitlines())
    assert (row["step"], row["kind"], row["text"] in shown[0]) == (5, "reward_zero", True)
    run = read_run(tmp_path)
    assert f"<dt>step 5</dt><dd>{row['text']}</dd>" in render_page([run])
    assert f"- step 5: {row['text']}" in render_text(run)


def test_a_resumed_run_neither_repeats_warnings_nor_keeps_later_ones(tmp_path):
    log = RunLog(tmp_path, 20, Console(quiet=True))
    for step in range(1, 9):
        log.write_step(step, GOOD | {"reward": 0.0})
    path = tmp_path / "warnings.jsonl"
    with path.open("a") as file:  # lines that no run wrote
        file.writelines(json.dumps(odd) + "\n" for odd in ({"step": 2, "kind": ["x"], "text": "x"}, {"step": 2}, [1]))
    for start, told in ((7, [5]), (4, [])):
        resumed = RunLog(tmp_path, 20, Console(quiet=True))
        resumed.start_at(start)
        resumed.write_step(start + 1, GOOD | {"reward": 0.0 if start == 7 else 0.1})
        resumed.write_step(start + 2, GOOD | {"reward": 0.0})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == told
