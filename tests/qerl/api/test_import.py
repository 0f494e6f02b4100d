"""`import qerl`: light, and with the same names for Python and for editors."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import qerl

ROOT = Path(qerl.__file__).parents[1]
IMPORT = """
import sys, time
began = time.process_time()
import qerl
assert "train" in dir(qerl)
print(time.process_time() - began, sorted({"torch", "pydantic", "typer", "numpy", "yaml"} & set(sys.modules)))
qerl.Recipe, qerl.train, qerl.evaluate, qerl.load, qerl.Run
print("torch" in sys.modules)
"""


def test_importing_qerl_is_light_and_so_are_its_names():
    printed = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd=ROOT)
    first, second = printed.stdout.splitlines()
    seconds, _, heavy = first.partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.1
    assert second == "False"


def test_editors_see_the_names_that_python_imports():
    tree = ast.parse(Path(qerl.__file__).read_text(encoding="utf-8"))
    for_editors = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }
    assert set(for_editors) == set(qerl.__all__) - {"__version__"}
    for name, module in for_editors.items():
        assert getattr(qerl, name).__module__ == module
        assert inspect.getdoc(getattr(qerl, name))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it has .*train"):
        qerl.trian  # noqa: B018
    assert (ROOT / "qerl" / "py.typed").is_file()
