"""The layers of the design: the syntax trees show which module imports which."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qerl import formats

ROOT = Path(__file__).parent.parent
PACKAGES = ("qerl", "quantize", "training", "eval")
# third-party package -> the only files that may import it
SOLE_IMPORTERS = {
    "vllm": ("qerl/engine/vllm_engine.py", "qerl/vllm_plugin/"),
    "peft": ("qerl/checkpoint/adapter.py",),
    "trl": ("training/trainer.py", "training/trl_config.py"),
    "llmcompressor": ("quantize/",),
}
# The command line and the Python interface start all stages, and `qerl train --quantize` two of them.
ENTRY_POINTS = {
    "qerl/cli.py": {"quantize", "training", "eval"},
    "qerl/commands/train.py": {"quantize", "training"},
    "qerl/api/training.py": {"training"},
    "qerl/api/evaluation.py": {"eval"},
    "qerl/api/folders.py": {"quantize"},
}


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node):
    """All nodes except those that only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield from walk(child)


def imported_packages(path):
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_stages_import_qerl_and_never_one_another(path):
    name = path.relative_to(ROOT).as_posix()
    own = name.partition("/")[0]
    allowed = {own, "qerl"} | ENTRY_POINTS.get(name, set())
    assert set(imported_packages(path)) & set(PACKAGES) <= allowed


@pytest.mark.parametrize("package", SOLE_IMPORTERS)
def test_each_heavy_package_has_its_importers(package):
    importers = {path.relative_to(ROOT).as_posix() for path in sources() if package in imported_packages(path)}
    strangers = {name for name in importers if not name.startswith(SOLE_IMPORTERS[package])}
    assert not strangers
    assert importers or package == "llmcompressor"  # imported by name, to explain it if it is missing


def names_torch_distributed(node):
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.distributed") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.startswith("torch.distributed") or (
            module == "torch" and any(alias.name == "distributed" for alias in node.names)
        )
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"


def test_only_parallel_talks_to_other_processes():
    users = [path for path in sources() if any(map(names_torch_distributed, ast.walk(ast.parse(path.read_text()))))]
    launcher = "qerl/commands/launch.py"  # it starts the processes
    assert [path.relative_to(ROOT).as_posix() for path in users] == [launcher, "qerl/process_group.py"]


def strings(tree):
    """The string constants of a module, without docstrings and the help texts of options and keys."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            skipped.add(node.body[0].value)
        if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            skipped.update(ast.walk(node.value))
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in skipped)
    return [node.value for node in texts if isinstance(node.value, str)]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_formats_know_their_names(path):
    """Everything else asks the value: a format is never an `if` on its name."""
    word = re.compile(rf"(?<![\w.-])({'|'.join(formats.names())})(?![\w-])")
    named = [text for text in strings(ast.parse(path.read_text(encoding="utf-8"))) if word.search(text)]
    assert not named or path.relative_to(ROOT).as_posix().startswith("qerl/formats/")


def test_the_search_for_names_finds_them():
    tree = ast.parse('"""nvfp4"""\nif kind == "nvfp4":\n    say(f"write {x}, bf16", help="nvfp4 or bf16")')
    assert strings(tree) == ["nvfp4", "write ", ", bf16"]


def test_importing_the_formats_loads_no_torch():
    code = "import sys, qerl.formats; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "False\n"


def test_the_command_line_loads_nothing_heavy():
    heavy = ("torch", "transformers", "datasets", "numpy", "pydantic", "peft", "trl", "vllm")
    code = f"import sys, qerl.cli; print([name for name in {heavy!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout.strip() == "[]"


def test_every_package_is_installed():
    """They are listed by hand, and one that is not listed is missing from the wheel alone."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    made = [path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(path.relative_to(ROOT).parts) for path in made)


def test_no_test_folder_is_a_package():
    """The folders of tests/ are named like the packages: an __init__.py would make Python import them instead."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
