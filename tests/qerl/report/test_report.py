"""The report of a run: means by noise stage compared with values by hand, pictures, and refusals."""

import pytest
from matplotlib.figure import Figure

from qerl.base.errors import ConfigError, DataError
from qerl.report.curves import PANELS, constant_table, draw_panel, draw_time, panels
from qerl.report.page import write_report
from qerl.report.read import read_run
from qerl.report.sections import stage_table
from tests.helpers.report_factory import DYNAMIC, ROWS, write_run


def entropy_panel(run):
    """The axes of the entropy panel: the left one, and that of sigma."""
    figure = Figure()
    draw_panel(figure.subplots(), next(panel for panel in PANELS if panel.noise), [run])
    return figure.axes


def test_means_by_stage():
    heading, cells = stage_table(ROWS)
    assert [row[:5] for row in cells] == [
        ["0", "1 to 2", "0", "0.600", "0.600"],
        ["1", "3 to 4", "0.01", "0.800", "0.810"],
        ["2", "5 to 5", "0.001", "0.400", "0.401"],
    ]
    assert heading == ["stage", "steps", "sigma", "entropy", "sampling entropy", "reward", "mismatch_kl"]  # no ess
    assert cells[1] == ["1", "3 to 4", "0.01", "0.800", "0.810", "0.250", "1.0e-04"]


def test_a_value_that_is_missing_is_left_out_of_the_mean():
    rows = [{**row, "entropy": None} if row["step"] == 3 else row for row in ROWS]
    assert stage_table(rows)[1][1][3] == "0.700"  # the value of step 4


def test_entropy_is_drawn_with_the_stages_and_sigma(tmp_path):
    left, right = entropy_panel(read_run(write_run(tmp_path, ROWS)))
    assert list(left.lines[0].get_ydata()) == [0.5, 0.7, 0.9, 0.7, 0.4]
    boundaries = [line.get_xdata()[0] for line in left.lines[2:]]
    assert boundaries == [2.5, 4.5]
    assert list(right.lines[0].get_ydata()) == [0.01, 0.01, 0.001]  # a logarithmic axis cannot show a clean stage


def test_a_run_without_noise_has_no_second_axis(tmp_path):
    rows = [{**row, "noise/sigma": 0.0, "noise/stage": 0} for row in ROWS]
    assert len(entropy_panel(read_run(write_run(tmp_path, rows)))) == 1
    write_report([tmp_path])
    assert "by noise stage" not in (tmp_path / "report.md").read_text()


def test_the_cost_of_dynamic_sampling_is_reported(tmp_path):
    rows = [{"step": i + 1, "reward": 0.5, "time/step_s": 10.0} for i in range(3)]
    for row, counts in zip(rows, DYNAMIC, strict=True):
        row |= {f"dynamic_sampling/{name}": count for name, count in counts.items()}
    rows[0] |= {"time/extra_rollouts_s": 6.0, "sampled/reward": 0.25}
    told = (
        "7 of the 8 groups trained on had a signal; 14 were sampled and 6 discarded (600 tokens), in 2 extra rollouts "
        "of 6 s, 20% of the run's time"
    )
    run = write_run(tmp_path, rows)
    page = write_report([run]).read_text()
    assert told.replace("'", "&#39;") in page
    text = (run / "report.md").read_text()
    assert f"Dynamic sampling: {told}." in text
    assert "| reward of all that was sampled | 0.25 |" not in text  # the last steps lack it
    assert "ynamic sampling" not in write_report([write_run(tmp_path / "plain", ROWS)]).read_text()


def test_no_curve_is_drawn_twice_and_none_that_is_flat(tmp_path):
    rows = [
        {
            "step": i,
            "reward": 0.1 * i,
            "rewards/accuracy": 0.1 * i,
            "sampled/reward": 0.1 * i,
            "correction/ess": 1 - 1e-9 * i,
        }
        | {"completions/mean_tokens": 5.0 + i, "completions/max_tokens": 8.0, "memory/train_gib": 3.0}
        for i in range(1, 4)
    ]
    run = read_run(write_run(tmp_path, rows))
    found = {panel.title: list(panel.lines) for panel in panels([run])}
    assert found == {"reward (accuracy is the same)": ["trained on"], "tokens per completion": ["mean"]}
    heading, cells = constant_table([run])
    assert heading == ["constant", "value"]
    assert cells == [
        ["importance weights (shares of tokens): effective sample size", "1.00"],
        ["tokens per completion: longest", "8.00"],
    ]
    page = write_report([run.folder]).read_text()
    assert page.count("<figure>") == 2  # reward and tokens
    assert '<th scope="row">tokens per completion: longest</th><td>8.00</td>' in page


def test_time_is_one_bar_stacked_by_phase(tmp_path):
    rows = [{"step": i, "time/step_s": 10.0, "time/rollout_s": 6.0, "time/reward_s": 1.0} for i in (1, 2)]
    figure = Figure()
    draw_time(figure.subplots(), [read_run(write_run(tmp_path, rows))])
    (axis,) = figure.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axis.patches] == [
        (0, 0.6),
        (pytest.approx(0.6), pytest.approx(0.1)),
        (pytest.approx(0.7), pytest.approx(0.3)),
    ]
    assert axis.get_legend_handles_labels()[1] == ["rollout 60%", "grading 10%", "the rest 30%"]


def test_folders_that_cannot_be_reported_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        write_report([tmp_path / "nowhere"])
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "result.json").write_text("{}")
    with pytest.raises(DataError, match=r"is an evaluation: .* with --before and --after"):
        write_report([evaluation])
    with pytest.raises(DataError, match=r"no steps in metrics\.jsonl: give"):
        write_report([write_run(tmp_path / "new", [])])
    with pytest.raises(ConfigError, match="--before FOLDER --after FOLDER"):
        write_report([write_run(tmp_path / "run", ROWS)], before=tmp_path)
