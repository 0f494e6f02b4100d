"""Which module imports which, by the syntax trees: imports for type checkers and inside functions included."""

import ast
from functools import cache

from tests.helpers.syntax import PACKAGES, ROOT, nodes, python_files

# Folders from the lowest to the highest. Those in one line may not import each other. A folder's sub-folders count as
# the folder, unless they are listed. The files right inside `training` are above its folders.
ORDER = (
    ("qerl.base",),
    ("qerl.formats",),
    ("qerl.config",),
    ("qerl.data",),
    ("qerl.model",),
    ("qerl.checkpoint",),
    ("qerl.plan",),
    ("qerl.engine",),
    ("qerl.episodes",),
    ("qerl.report",),
    ("training.recipes", "training.loss"),
    ("training.sft",),  # reads rows; the step on them is training/sft_step.py
    ("training.policy",),
    ("training.rewards",),
    ("training.rollout",),
    ("training.run_dir",),
    ("training.validation",),
    ("training.preflight",),
    ("training", "quantize"),
    ("eval",),
    ("qerl.cli",),
    ("qerl.api",),
)
# `python -m eval.gsm8k` is a command, and starts what `qerl eval gsm8k` starts.
COMMANDS = tuple(f"eval.{task}" for task in ("aime24", "aime25", "amc23", "arith", "gsm8k", "math500"))
FLOOR = {folder: floor for floor, folders in enumerate(ORDER) for folder in folders}


@cache
def modules():
    """The path of each module by its dotted name. The package `qerl` itself is left out: it only has the version and
    names of the Python interface."""
    found = {}
    for path in python_files(*PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found["qerl"]
    return found


def folder_of(module):
    """The folder in ORDER that a module belongs to."""
    parts = module.split(".")
    while parts and ".".join(parts) not in FLOOR:
        parts.pop()
    if not parts:
        raise AssertionError(f"{module} is in no folder of ORDER (tests/helpers/folders.py): add its folder there")
    return ".".join(parts)


def imported(module, among=None):
    """The modules of ours that a module imports, by the nodes of its tree, or by those `among` them."""
    found = set()
    for node in nodes(modules()[module]) if among is None else among:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules() else node.module)
    return found & set(modules())


def goes_up(module, other):
    """Whether `module` may not import `other`: it is in a higher folder, or in another one of the same line."""
    here, there = folder_of(module), folder_of(other)
    if module in COMMANDS:
        return False
    return here != there and FLOOR[there] >= FLOOR[here]


@cache
def upward():
    """(module, imported module) of every import that goes up."""
    return {(module, other) for module in modules() for other in imported(module) if goes_up(module, other)}
