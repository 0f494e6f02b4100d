"""scripts/bench/profile_host.py: each second of a step is a phase's, or a function's that is named."""

import json
import sys
import time

import profile_host
import pytest

from scripts.bench.host_calls import Recorder

WORK = ("--prompts", "2", "--group", "2", "--prompt-tokens", "40", "--new-tokens", "4", "--rank", "2")


def slow():
    time.sleep(0.02)


def outer(recorder):
    slow()
    recorder.begin("forward")
    slow()  # not noted
    recorder.end()
    slow()


def test_calls_are_noted_under_their_callers_and_phases_as_a_whole():
    waits = []
    recorder = Recorder(0.01, lambda: waits.append(None))
    recorder.start()
    outer(recorder)
    recorder.mark(profile_host.STEP_ENDS)
    slow()
    report = {"calls": profile_host.as_record(recorder.stop()), "step": 1, "times": [{"time/step_s": 0.06}]}
    assert len(waits) == 2
    calls, ms = profile_host.in_step(report)
    names = {call["name"].rpartition(".")[2]: call for call in calls}
    assert [call["name"].rpartition(".")[2] for call in names["outer"]["calls"]] == ["slow", "forward", "slow"]
    assert ms == pytest.approx(60, abs=30)
    sums = {name.rpartition(".")[2]: value for name, value in profile_host.by_itself(calls).items()}
    assert sums["sleep"][1] == 2
    assert sums["sleep"][0] == pytest.approx(40, abs=20)
    assert sum(own for own, _ in sums.values()) + profile_host.ms_of_phases(names["outer"]) == pytest.approx(ms, abs=2)
    said = "\n".join(profile_host.text(report))
    assert "[forward]" in said
    assert "step 1: step_s 0.060" in said


def test_a_step_of_a_run(nvfp4_base, tmp_path, monkeypatch, capsys):
    out = tmp_path / "host.json"
    words = ["--model", str(nvfp4_base), *WORK, "--steps", "2", "--step", "1", "--least", "0.1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["profile_host.py", *words])
    profile_host.main()
    report = json.loads(out.read_text())
    calls, ms = profile_host.in_step(report)
    phases = sum(map(profile_host.ms_of_phases, calls))
    assert ms == pytest.approx(1e3 * report["times"][0]["time/step_s"], rel=0.25)  # the machine may be busy
    counted = sum(report["times"][0][f"time/{name}_s"] for name in ("rollout", "reward", "forward", "backward"))
    assert phases == pytest.approx(1e3 * counted, rel=0.25, abs=50)
    said = capsys.readouterr().out
    assert "[rollout]" in said
    assert "training.step.padded_batch" in said


def test_a_step_needs_one_after_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile_host.py", "--model", "tiny", "--steps", "3"])
    with pytest.raises(SystemExit):
        profile_host.main()
    assert "--step 3 needs a step after it: write --steps 4 or more" in capsys.readouterr().err
