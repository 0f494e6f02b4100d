"""The examples of the pages on environments: each is loaded as a recipe names it, and a TRL user's script runs."""

import os
import re
from pathlib import Path

import pytest

from qerl.episodes.build import Source, build
from qerl.episodes.driven import Action, Call

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("environments.md", "other-environments.md")
SHORTER = (
    '"run.steps=1", "model.format=bf16", "rollout.prompts_per_step=2", "rollout.group_size=2", '
    '"rollout.max_new_tokens=24", "noise.enabled=false"'
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of the pages, in the working directory."""
    monkeypatch.chdir(tmp_path)
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(code, encoding="utf-8")
    return sorted(os.listdir())


def test_the_environment_and_the_tool_of_the_page_answer(files):
    assert files == ["guess.py", "guess_trl.py", "solve.py", "tools.py"]
    guess = build(Source("guess.py:Guess")).make()
    guess.reset({"answer": "7"}, seed=0)
    replies = [guess.step(Action(text)) for text in ("5", "x", "7")]
    assert [(reply.reward, reply.done) for reply in replies] == [(0.0, False), (-0.1, False), (1.0, True)]
    built = build(Source(None, ("tools.py:population", "calculator")))
    assert [schema["function"]["name"] for schema in built.schemas] == ["population", "calculate"]
    (message,) = built.make().step(Action("", (Call("population", {"city": "Oslo"}),))).messages
    assert message["content"] == "709000"
    assert build(Source("solve.py:solve")).schemas == ()


@pytest.mark.usefixtures("one_thread")
def test_the_script_of_a_trl_user_runs(files, capsys):
    code = Path("guess_trl.py").read_text()
    assert code.count('"run.steps=2"') == 1
    space = {"__name__": "guess_trl"}
    exec(compile(code.replace('"run.steps=2"', SHORTER).replace("quantize=True", "quantize=False"), "x", "exec"), space)
    assert space["run"].finished
    assert "rewards/solved" in capsys.readouterr().out
