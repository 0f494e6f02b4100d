"""The examples of docs/python-api.md, run as they stand, one after another."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "python-api.md"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_examples_of_the_python_page_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 11
    space = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    printed = capsys.readouterr().out
    said = re.search(r"It prints `(.*?)`\.", PAGE.read_text(encoding="utf-8"))[1]
    assert said in printed
    assert "3 steps, reward" in repr(space["run"])
    assert (tmp_path / "reward.png").stat().st_size > 1000
