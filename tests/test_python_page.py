"""The examples of the pages on Python, run as they stand, one after another."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_examples_of_the_python_page_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("python-api.md", "python-results.md"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 12
    space = {}
    for block in blocks:  # the base is rounded to nearest, in a second
        block = block.replace('quantize("tiny")', 'quantize("tiny", method="rtn", calibration="none")')
        exec(compile(block, "docs", "exec"), space)
    printed = capsys.readouterr().out
    said = re.search(r"It prints `(.*?)`\.", text)[1]
    assert said in printed
    assert "3 steps, reward" in repr(space["run"])
    assert (tmp_path / "reward.png").stat().st_size > 1000
