"""The syntax trees of our source files, each parsed once per process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("qerl", "quantize", "training", "eval")


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path):
    """The path of a file from the root, as texts name it."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path):
    """All nodes of a file."""
    return list(ast.walk(tree(path)))
