"""The notebook, its cells run as they stand from top to bottom, on fewer steps and questions and a rounded base."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "first_run.ipynb"
FEWER = {
    "quantize(MODEL, ": "quantize(MODEL, method='rtn', calibration='none', ",
    "STEPS, QUESTIONS = 30, 100": "STEPS, QUESTIONS = 1, 2",
    '"run.steps": STEPS,': '"run.steps": STEPS, "data.limit": 24,',
}

pytestmark = pytest.mark.usefixtures("one_thread")


def run_cell(source, space):
    """Run a cell, and return what a notebook would show: the value of its last expression."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), str(NOTEBOOK), "exec"), space)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), space)
    exec(compile(ast.Module([last], []), str(NOTEBOOK), "exec"), space)
    return None


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    for full, fewer in FEWER.items():
        assert sum(full in cell for cell in cells) == 1
        cells = [cell.replace(full, fewer) for cell in cells]
    space = {}
    shown = [run_cell(cell, space) for cell in cells]
    assert (tmp_path / shown[1]).is_dir()
    assert "before, " in shown[-3]
    assert isinstance(shown[-2], str)
    assert (space["run"].steps, space["run"].finished) == (1, True)
    assert (space["merged"].out / "config.json").is_file()
