"""The page of a report: no text of a run can act in it, it sends no requests, and it shows what it should."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
import yaml
from matplotlib.figure import Figure

from qerl.base.errors import ConfigError, DataError
from qerl.report.curves import DRAWN, LINES, PANELS, TEXT, draw_panel
from qerl.report.page import LONGEST, extremes, render_page, render_texts, shorten, write_report
from qerl.report.read import read_evaluation, read_run, read_runs
from qerl.report.sections import Judged, changes, differences, held_out, memory, phases
from tests.helpers.report_factory import CONFIG, ROWS, full_run, sample, write_evaluation, write_run

HOSTILE = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}<a href='//evil.example'>"


class Page(HTMLParser):
    """Collects every tag with its attributes, and the text between tags."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def links(self):
        return [attrs[key] for _, attrs in self.tags for key in ("src", "href", "srcset", "action") if key in attrs]


def test_a_completion_is_shown_as_plain_text(tmp_path):
    """Even with tags, template syntax, an end of its block, lone surrogates, direction marks or control characters."""
    strange = HOSTILE + "\ud800 \u202e \x00 \x1b[31m"
    run = full_run(tmp_path / "run", [sample(strange, 1.0, prompt=HOSTILE), sample("b" + strange, 0.0)])
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "data": {"task": HOSTILE}}))
    write_evaluation(run / "eval" / "one", [False], HOSTILE)
    html = render_page([read_run(run, HOSTILE)])
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on")]
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in page.links())
    assert page.text.count("<script>alert(1)</script>") >= 6  # title, heading, task, prompt, completions, evaluation
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search("[\x00-\x08\x1b\u202e\ud800]", html)
    html.encode("utf-8")


def test_the_pictures_hold_no_scripts_and_no_requests(tmp_path):
    html = render_page([read_run(full_run(tmp_path / "run"), "<b>$x$</b>"), read_run(full_run(tmp_path / "other"))])
    pictures = [base64.b64decode(link.partition(",")[2]).decode() for link in Page(html).links() if link[0] != "#"]
    assert len(pictures) == 2 * 2  # reward and entropy, for light and for dark screens
    for picture in pictures:
        assert "<script" not in picture
        assert not re.search(r"(href|src)=[\"'](?!#)", picture)
        assert not re.search(r"url\((?!#)", picture)
        assert "<b>" not in picture
    assert "&lt;b&gt;$x$&lt;/b&gt;" in html


def test_the_page_forbids_what_it_does_not_need(tmp_path):
    page = Page(render_page([read_run(full_run(tmp_path / "run"))]))
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    dark = [attrs for tag, attrs in page.tags if tag == "source"]
    light = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(dark) == len(light) > 0
    assert all(attrs["media"] == "(prefers-color-scheme: dark)" for attrs in dark)
    assert all(attrs["alt"] for attrs in light)
    pictures = [base64.b64decode(attrs.get("srcset", attrs.get("src"))[26:]).decode() for attrs in (dark[0], light[0])]
    for colours in (TEXT, LINES, DRAWN[0]):
        for own, other, picture in zip(colours[::-1], colours, pictures, strict=True):
            assert own in picture
            assert other not in picture


def test_the_sections_of_a_run(tmp_path):
    run = full_run(tmp_path / "run", [sample("good", 1.0), sample("bad", 0.0)])
    page = render_page([read_run(run)])
    for cell in ("3 to 4", "0.810", "1.0e-04"):  # the noise stage of test_report.py, by hand
        assert f"<td>{cell}</td>" in page
    assert "<dt>steps</dt><dd>5 of 5</dd>" in page
    assert "<dt>begun by</dt><dd>qerl train</dd>" in page
    assert "<dt>trl</dt><dd>1.16.0</dd>" in page
    assert "task: arith" in page
    assert "Evaluation" not in page
    order = ['class="verdict"', "<figure>", "good", "bad", "<table>"]
    assert [page.index(each) for each in order] == sorted(page.index(each) for each in order)


def test_evaluations_of_the_run_and_others(tmp_path):
    run = full_run(tmp_path / "run")
    write_evaluation(run / "eval" / "last", [True])
    compared = (
        read_evaluation(write_evaluation(tmp_path / "base", [False], "no")),
        read_evaluation(run / "eval" / "last"),
    )
    html = render_page([read_run(run)], compared, Judged("cannot tell", "After training: cannot tell."))
    page = Page(html)
    names = re.findall(r'<th scope="row">(base|last)<', html)
    assert names == ["base", "last"]  # the one before training comes first
    assert "cannot tell" in page.text
    assert page.text.count("5.0% to 95.0%") == 2 + 2 + 2  # in the verdict, beside a bar and in the table
    assert "100.0%" in page.text
    assert "Before (wrong)" in page.text
    assert "After (right)" in page.text
    assert "Graded wrong in base" in page.text
    assert "Graded wrong in last" not in page.text


def test_a_result_of_another_suite_is_shown_as_far_as_possible(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "reward": 0.5}])
    (run / "eval" / "other").mkdir(parents=True)
    scores = {"ifeval:0": {"strict": 0.25, "strict_stderr": 0.125}}
    result = {"suite": "lighteval", "task": "ifeval|0", "model": "run r, nvfp4 base b", "scores": scores}
    (run / "eval" / "other" / "lighteval.json").write_text(json.dumps(result))
    page = Page(render_page([read_run(run)]))
    assert "ifeval|0" in page.text
    assert "0.250 ± 0.125" in page.text
    assert "run r" in page.text
    assert "nvfp4 base" not in page.text  # what the run itself says
    assert "Graded wrong" not in page.text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["/x/bin/qerl", "train", "--set", "a=b c"], "qerl train --set 'a=b c'"),
        (["/x/qerl/cli/main.py", "sft"], "qerl sft"),
        (["train.py", "--big"], "python train.py --big"),
        (["/x/cli/main.py"], "python /x/cli/main.py"),
        (["/x/ipykernel_launcher.py", "-f", "k.json"], "a notebook"),
        (["-c"], "Python, without a script"),
        ([""], "Python, without a script"),
    ],
)
def test_what_began_a_run_is_named(tmp_path, command, shown):
    run = write_run(tmp_path / "run", [{"step": 1}])  # nothing to draw, which is what a page takes its time for
    (run / "run.json").write_text(json.dumps({"command": command}))
    assert f"begun by{shown}" in Page(render_page([read_run(run)])).text.replace("\n", "")


def test_accuracy_before_and_after_stands_before_the_curves(tmp_path):
    """Of the evaluations that are given, else of the first and the last validation; not of a single one."""
    rows = [{"step": step, "reward": 0.1 * step} for step in range(3)]
    for row, value in zip(rows, (0.125, 0.5, 0.75), strict=True):
        row |= {"validation/reward": value, "validation/accuracy": value}
        row |= {"validation/accuracy_low": value - 0.1, "validation/accuracy_high": value + 0.1}
    run = read_run(write_run(tmp_path / "run", rows))
    html = render_page([run])
    assert re.findall(r"<span>(step \d)</span>.*width: ([\d.]+)%.*left: ([\d.]+)%; width: ([\d.]+)%", html) == [
        ("step 0", "12.5", "2.5", "20.0"),
        ("step 2", "75.0", "65.0", "20.0"),
    ]
    assert html.index("step 2</span>") < html.index("<figure>")
    assert '"shares"' not in render_page([read_run(write_run(tmp_path / "one", rows[1:2]))])
    assert held_out(run, tuple(read_evaluation(write_evaluation(tmp_path / name, [True])) for name in "ab")) == [
        (when, {"value": 1.0, "low": 0.05, "high": 0.95}) for when in ("before", "after")
    ]


@pytest.mark.parametrize(("rewards", "limits"), [((0.1, 0.9), (-0.02, 1.02)), ((0.0, 0.2), None), ((0.5, 1.5), None)])
def test_a_reward_that_is_a_share_is_drawn_from_0_to_1(tmp_path, rewards, limits):
    run = read_run(write_run(tmp_path, [{"step": step, "reward": value} for step, value in enumerate(rewards, 1)]))
    axis = Figure().subplots()
    draw_panel(axis, next(panel for panel in PANELS if panel.title == "reward"), [run])
    assert (axis.get_ylim() == limits) is (limits is not None)


def test_several_runs_side_by_side(tmp_path):
    other = {**CONFIG, "run": {**CONFIG["run"], "seed": 1, "out": "runs/y"}, "noise": {"sigma_start": 0.1}}
    runs = read_runs([full_run(tmp_path / "one"), full_run(tmp_path / "two", config=other), tmp_path / "one"])
    assert [run.name for run in runs] == ["one", "two"]
    assert differences(runs) == [["run.seed", "0", "1"], ["noise.sigma_start", "", "0.1"]]
    page = Page(render_page(runs))
    assert "mean: first steps to last steps" in page.text
    assert page.text.index("run.seed") < page.text.index("The reward")  # what differs comes first
    text = render_texts(runs)
    assert (
        text.index("| run.seed | `0` | `1` |") < text.index("**one**: The reward") < text.index("**two**: The reward")
    )
    assert text.count("| reward |") == 1  # means stand side by side
    alike = read_runs([tmp_path / "one", write_run(tmp_path / "deep" / "one", ROWS)])
    assert [run.name for run in alike] == [str(tmp_path / "one"), str(tmp_path / "deep" / "one")]


def test_best_and_worst_completions_are_chosen_by_the_weighted_reward(tmp_path):
    """Weights are 1 and -2; a function's metric has its short name. Equal texts count once, early samples do not."""
    config = {**CONFIG, "rewards": [{"name": "accuracy"}, {"name": "/x/mine.py:length", "weight": -2.0}]}
    samples = [sample("a", 1.0, length=0.4), sample("b", 1.0, length=0.1), sample("b", 1.0, length=0.1)]
    run = full_run(tmp_path / "run", [*samples, sample("c", 0.0, length=0.3), sample("d", None, length=0.2)], config)
    early = run / "completions" / "step-000001.jsonl"
    early.write_text(json.dumps(sample("early", 9.0)) + "\n")
    found = extremes(read_run(run))
    assert [(s.completion, s.reward) for s in found.best] == [("b", pytest.approx(0.8)), ("a", pytest.approx(0.2))]
    assert [(s.completion, s.reward) for s in found.worst] == [("c", pytest.approx(-0.6)), ("d", pytest.approx(-0.4))]
    assert (found.count, found.from_step) == (6, 4)


def test_a_page_shows_no_rewards_and_no_completions_where_a_run_has_none(tmp_path):
    rows = [row | {"validation/loss": 1.0} for row in ROWS]
    taught = full_run(tmp_path / "taught", config={**CONFIG, "sft": {}})
    sampled = full_run(tmp_path / "distilled", [{"prompt": "1 + 1", "completion": "two"}], {**CONFIG, "distill": {}})
    write_run(taught, rows)
    one, other, both = (render_page(read_runs(runs)) for runs in ([taught], [sampled], [taught, sampled]))
    assert "ompletions" not in Page(one).text
    assert ('href="#validation"' in one, 'href="#validation"' in other) == (True, False)
    assert "Examples" in other
    assert not re.search("Best|Worst|ordered by reward|0 at step", Page(other).text)
    assert "learned from given conversations and wrote none" in both
    assert "logging.completions_count" in render_page([read_run(full_run(tmp_path / "rl"))])


def test_a_long_completion_says_how_much_is_left_out():
    text = "a" * LONGEST + "b" * 100
    assert shorten(text[:LONGEST]) == text[:LONGEST]
    assert "[... 100 characters left out ...]" in shorten(text)
    assert shorten(text).endswith("b" * 100)


def test_time_by_phase_equals_values_by_hand():
    rows = [
        {"time/step_s": 10.0, "time/rollout_s": 4.0, "time/sync_s": 1.0, "time/train_s": 3.0},
        {"time/step_s": 6.0, "time/train_s": 6.0},  # a second update on the same rollout
    ]
    found = {phase.name: phase[1:] for phase in phases(rows)}
    assert found["rollout"] == (2.0, 4.0, 0.25)
    assert found["training"] == (4.5, 9.0, 9 / 16)
    assert found["grading and the rest"] == (1.0, 2.0, 0.125)
    assert phases([{"step": 1}]) == []


def test_the_time_of_training_is_divided_into_parts_if_a_run_has_them():
    """A run begun by an older version and resumed by this one has both; neither is counted twice."""
    old = {"time/step_s": 10.0, "time/rollout_s": 4.0, "time/sync_s": 1.0, "time/train_s": 3.0}
    training = {"time/forward_s": 1.0, "time/backward_s": 2.0, "time/optimizer_s": 0.5, "time/train_s": 4.0}
    new = {"time/step_s": 10.0, "time/rollout_s": 3.0, "time/sync_s": 1.0, "time/reward_s": 1.5, **training}
    assert {phase.name: phase.total_s for phase in phases([new])} == {
        "rollout": 3.0, "adapter sync": 1.0, "grading": 1.5, "forward": 1.0, "backward": 2.0, "optimizer": 0.5,
        "the rest": 1.0,
    }  # fmt: skip
    found = {phase.name: phase.total_s for phase in phases([old, new])}
    assert (found["training"], found["forward"], found["the rest"]) == (3.0, 1.0, 3.0)


def test_a_step_whose_rows_were_all_masked_does_not_count_as_one_of_an_older_version():
    """It had no forward pass and so no time/forward_s; its time/train_s is that of packing and metrics."""
    row = {"time/step_s": 10.0, "time/rollout_s": 7.0, "time/reward_s": 1.0, "time/optimizer_s": 0.5}
    found = {phase.name: phase.total_s for phase in phases([row | {"time/train_s": 1.25}])}
    assert found == {"rollout": 7.0, "grading": 1.0, "optimizer": 0.5, "the rest": 1.5}


def test_memory_and_changes_equal_values_by_hand():
    rows = [{"memory/peak_gib": value, "reward": value} for value in (1.0, 3.0, 5.0, 3.0, 2.0, 4.0, 4.0, 4.0, 4.0, 9.0)]
    assert memory(rows) == [("peak", pytest.approx(3.9), 9.0)]
    assert changes(rows) == [("reward", 2.0, 6.5)]  # means of two steps at each end


def test_a_run_that_only_began_has_a_page(tmp_path):
    run = write_run(tmp_path / "new", [{"step": 1, "reward": 0.5}])
    page = Page(write_report([run]).read_text())
    assert "This run has no config.yaml" in page.text
    assert "This run logged no completions" in page.text


def test_the_place_of_the_page(tmp_path):
    one, two = (write_run(tmp_path / name, [{"step": 1, "reward": 0.5}]) for name in ("one", "two"))
    assert write_report([one]) == one / "report.html"
    assert write_report([one, two]) == one / "comparison.html"
    (one / "report.md").unlink()
    assert write_report([one], out=tmp_path / "deep" / "page.html").read_text().startswith("<!doctype html>")
    assert [(folder / "report.md").exists() for folder in (one, tmp_path / "deep")] == [False, False]
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be written \(.*\): give another file with --out"):
        write_report([one], out=one / "metrics.jsonl" / "page.html")
    with pytest.raises(ConfigError, match="is a folder: give the file"):
        write_report([one], out=tmp_path)
    (two / "config.yaml").write_text("run: [")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read"):
        write_report([two])


def test_a_file_that_is_no_page_of_ours_is_left_as_it_is(tmp_path):
    run, mine = full_run(tmp_path / "run"), tmp_path / "thesis.html"
    for text in ("<!doctype html>\n<html><title>My thesis</title></html>", ""):
        mine.write_text(text)
        with pytest.raises(ConfigError, match="no page that qerl wrote: it is left as it is, name another file"):
            write_report([run], out=mine)
        assert mine.read_text() == text
    mine.unlink()
    assert write_report([run], out=mine) == write_report([run], out=mine) == mine
