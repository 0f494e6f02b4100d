"""The tutorial of docs/own-data-and-reward.md, copied literally, with fewer and shorter steps."""

import re
import shlex
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from qerl.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "own-data-and-reward.md"
SHORTER = {
    "train": ["--steps=1", "--set=noise.enabled=false", "--set=rollout.group_size=2", "--set=rollout.max_new_tokens=8"],
    "eval": ["--limit", "2", "--max-new-tokens", "8"],
}


def tutorial():
    return PAGE.read_text(encoding="utf-8").partition("## From your own rows")[2].partition("\n## ")[0]


def test_the_tutorial_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tutorial()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        subprocess.run(["bash", "-ec", block], check=True, timeout=60)
    for name, block in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(block)
    commands = [shlex.split(line) for line in re.findall(r"^    (qerl .*)$", text, re.MULTILINE)]
    assert [words[1] for words in commands] == ["train", "eval"]
    for words in commands:
        done = CliRunner().invoke(app, [*words[1:], *SHORTER[words[1]]], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert "mean score" in done.output
    prompts = Path("runs/own/completions/step-000001.jsonl").read_text(encoding="utf-8")
    assert "boxed" not in prompts
