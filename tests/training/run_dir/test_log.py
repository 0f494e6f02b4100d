"""metrics.jsonl under kills, and TRL's names in our words."""

import math
import os
from pathlib import Path

from rich.console import Console

from qerl.report.metrics import deterministic, rename
from training.run_dir.log import RunLog, read_metrics, spread


def test_metrics_have_our_names():
    of_trl = {"reward": 0.5, "rewards/accuracy": 0.4, "clip_ratio/low_min": 0.0, "cispo_clip_ratio": 0.5, "epoch": 0.1}
    of_trl |= {"entropy": math.nan, "kl": None}
    ours = {"reward": 0.5, "rewards/accuracy": 0.4, "clip/high_share": 0.5, "entropy": None, "kl": None}
    assert rename(of_trl) == ours


def test_metrics_of_the_machine_are_separated():
    metrics = {"reward": 1, "time/step_s": 2, "speed/rollout_tokens_per_s": 3, "memory/peak_gib": 4}
    assert deterministic(metrics) == {"reward": 1}


def test_a_truncated_line_and_later_steps_are_dropped(tmp_path):
    log = RunLog(tmp_path, 5, Console(quiet=True))
    for step in (1, 2, 3):
        log.write_step(step, {"reward": step / 10})
        log.write_completions(step, [{"completion": "é"}])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])  # as after a kill
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    log.start_at(1)
    assert path.read_text() == '{"step": 1, "reward": 0.1}\n'
    assert [file.name for file in (tmp_path / "completions").iterdir()] == ["step-000001.jsonl"]
    log.write_step(2, {"reward": None})
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": None}]


def test_of_a_damaged_file_only_the_bad_line_is_lost(tmp_path, caplog):
    lines = [b'{"step": 1, "reward": 0.1}', b"\xff\x00broken", b'{"step": 2}', b"17", b'{"reward": 1}', b'{"step": 3}']
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert [f"line {number}" in caplog.text for number in range(1, 7)] == [False, True, False, True, True, False]
    RunLog(tmp_path, 5, Console(quiet=True)).start_at(2)
    assert path.read_text() == '{"step": 1, "reward": 0.1}\n{"step": 2}\n'


def test_rewritten_metrics_are_on_disk_before_they_replace_the_old_ones(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    original = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("replace"), original(self, to))[1])
    RunLog(tmp_path, 5, Console(quiet=True)).start_at(1)
    assert order == [str(tmp_path / "metrics.partial"), "replace", str(tmp_path)]


def test_without_a_terminal_lines_are_plain(tmp_path):
    console = Console(record=True, width=200, force_terminal=False)
    with RunLog(tmp_path, 4, console) as log:
        row = {"reward": 0.25, "entropy": 1.5, "noise/sigma": 0.01, "time/step_s": 3.0, "mismatch_kl": None}
        log.write_step(2, row)
    text = console.export_text()
    assert text == "step 2/4  reward 0.250  entropy 1.500  sigma 1.0e-02  s/step 3.0\n"


def test_a_sample_of_completions_is_spread_over_the_prompts():
    rows = [f"prompt {i // 4}, completion {i % 4}" for i in range(12)]
    assert spread(rows, 3) == ["prompt 0, completion 0", "prompt 1, completion 0", "prompt 2, completion 0"]
    assert spread(rows, 5) == [rows[i] for i in (0, 2, 4, 7, 9)]
    assert spread(rows[:2], 4) == rows[:2]
    assert spread(rows, 0) == spread([], 3) == []
