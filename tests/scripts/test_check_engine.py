"""The options of scripts/checks/check_engine.py; its checks run on a card, in test_vllm_engine_gpu.py."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("only", [["no_such_check"], ["repeat", "no_such_check"], []])
def test_an_unknown_check_is_refused_with_a_list_of_the_known_ones(monkeypatch, capsys, only):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts" / "checks")
    check_engine = importlib.import_module("check_engine")
    monkeypatch.setattr(sys, "argv", ["check_engine.py", "--model", "tiny", "--only", *only])
    with pytest.raises(SystemExit) as stopped:
        check_engine.main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--only" in said
    assert all(name in said for name in ("shared_memory", "sampler", "told", "reopened")) or not only
