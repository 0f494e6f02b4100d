"""The output during training: the display on a terminal, plain lines elsewhere, and the effect of Ctrl-C."""

import io
import json
import logging
import os
import pty
import re
import signal
import sys
import threading

import pytest
from rich.console import Console

import training.run
import training.trainer
from qerl.cli.main import app
from qerl.cli.terminal import run_command
from qerl.config.recipe import save_config
from tests.helpers.run_process import ended, forked, run_cli, wait_for
from tests.helpers.small_run import small_config
from training.rollout.sampler import Sampler
from training.run import start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.log import LONGEST, RunLog, completions_table, read_metrics

ROW = {"step": 3, "reward": 0.25, "noise/sigma": 0.01, "time/step_s": 4.0, "entropy": None}


def terminal(width=140):
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})


def shown(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_a_terminal_shows_the_phase_the_numbers_and_completions(tmp_path):
    console = terminal()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(ROW | {"step": step}) + "\n" for step in (1, 2, 3)))
    with RunLog(tmp_path, 5, console) as log:
        log.start_at(2)
        log.phase("grading")
        log.write_step(3, ROW | {"speed/rollout_tokens_per_s": 1234.5, "memory/peak_gib": 7.25})
        rewards = {"accuracy": 1.0, "format": None}
        log.write_completions(
            3, [{"prompt": "[red]1+1?", "completion": "\x1b[2J so\n2", "advantage": 0.5, "rewards": rewards}]
        )
    text = shown(console)
    for part in ("2/5", "3/5", "grading 3/5", "reward 0.250", "tokens/s 1,234", "GiB 7.2"):
        assert part in text
    assert "[red]1+1?" in text  # not taken for markup
    assert "\x1b[2J" not in console.file.getvalue()  # nor for a command to the terminal
    assert re.search(r"accuracy 1 .* so 2", text)


def test_a_long_completion_keeps_its_end():
    table = completions_table(1, [{"prompt": "p", "completion": "a" * 999 + "42", "rewards": {}}] * 9)
    assert table.row_count == 3
    (cell, *_) = table.columns[2].cells
    assert cell.plain.endswith("a42")
    assert len(cell.plain) < LONGEST + 10


def test_log_lines_go_above_the_display_and_afterwards_to_stderr_again(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with RunLog(tmp_path, 5, terminal()):
            logging.getLogger("x").error("between")
        logging.getLogger("x").error("after")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "between\nafter\n"


def test_a_second_ctrl_c_stops_at_once_and_says_how_to_go_on(nvfp4_base, tmp_path, monkeypatch, caplog):
    before, original = signal.getsignal(signal.SIGINT), Sampler.sample

    def interrupted(self, prompts, moment, *rest):
        for _ in range(2 if moment == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return original(self, prompts, moment, *rest)

    monkeypatch.setattr(Sampler, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(small_config(nvfp4_base, tmp_path, steps=4), "tiny")
    assert signal.getsignal(signal.SIGINT) == before
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert f"stopped at once; continue with `qerl train --resume {tmp_path / 'run'}`" in caplog.text


def test_the_exit_code_after_one_and_two_interrupts(nvfp4_base, tmp_path, monkeypatch):
    save_config(small_config(nvfp4_base, tmp_path), tmp_path / "recipe.yaml")
    command = ["train", "--recipe", str(tmp_path / "recipe.yaml")]

    def interrupted(*_):
        raise KeyboardInterrupt

    for outcome in (interrupted, lambda *_: training.run.TrainResult(tmp_path, None, 3)):
        monkeypatch.setattr(training.run, "start", outcome)
        with pytest.raises(SystemExit) as ended:
            run_command(app, command)
        assert ended.value.code == 130


def test_a_run_on_a_terminal_and_its_end_by_ctrl_c(nvfp4_base, tmp_path):
    """The whole command runs on a real pseudo-terminal."""
    save_config(small_config(nvfp4_base, tmp_path, steps=1000), tmp_path / "recipe.yaml")
    master, slave = pty.openpty()
    process = forked(on_a_screen, ["train", "--recipe", str(tmp_path / "recipe.yaml")], os.ttyname(slave))
    received = []
    reader = threading.Thread(target=_read_all, args=(master, received), daemon=True)
    reader.start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ended(process):
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
        os.kill(process.pid, signal.SIGINT)
    assert process.exitcode == 130
    os.close(slave)
    reader.join(timeout=60)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(received).decode(errors="replace"))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert checkpoints(tmp_path / "run")[-1].name == f"step-{rows[-1]['step']:06d}"
    assert "/1000" in text
    assert any(f"{phase} " in text for phase in ("rollout", "training", "saving"))
    assert "completion" in text  # the table of step 1
    assert "stopping after this step" in text
    assert "continue with `qerl train --resume" in text.replace("\r\n", " ").replace("  ", " ")
    assert "Traceback" not in text


def on_a_screen(arguments, terminal):
    os.environ |= {"TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
    run_cli(arguments, terminal, leads=True)


def _read_all(master, received):
    try:
        while data := os.read(master, 65536):
            received.append(data)
    except OSError:  # the other end is closed
        os.close(master)
