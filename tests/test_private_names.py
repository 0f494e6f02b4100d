"""No module, test or script uses a private name of another of ours. Read from the syntax trees."""

import ast

import pytest

from tests.helpers.syntax import PACKAGES, ROOT, name_of, nodes, python_files

SOURCES = python_files(*PACKAGES, "scripts", "tests")
OURS = {*PACKAGES, *(path.stem for path in SOURCES if path.parts[len(ROOT.parts)] in ("scripts", "tests"))}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_ours(module):
    return (module or "").partition(".")[0] in OURS


def members(module):
    """The private names of a module's classes: methods, fields, and what they write to self."""
    names = set()
    for owner in (node for node in module if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return set(filter(is_private, names))


def our_modules(module):
    """The names by which a module calls others of ours."""
    return {
        alias.asname or alias.name
        for node in module
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if is_ours(alias.name if isinstance(node, ast.Import) else node.module)
    }


def called(node):
    """The last part of the name of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def private_uses(module):
    """(line, owner, name) of each `owner._name`, also where a call gives the name as text, as `setattr` takes it."""
    for node in module:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and called(node).endswith(("setattr", "getattr", "delattr")):
            owner, name = ([*map(ast.unparse, node.args), ""])[:2]
            path = owner.strip("'\"")
            if is_private(name.strip("'\"")):
                yield node.lineno, owner, name.strip("'\"")
            elif path != owner and is_private(path.rpartition(".")[2]):  # one text: "package.module._name"
                yield node.lineno, *path.rpartition(".")[::2]


def strange_privates(module, all_members):
    """Private names that a module, given by its nodes, takes from another of ours: imports, `module._name`, and
    `value._name` of a class that another module defines. Those of other projects are not meant: some can be had in no
    other way."""
    found, own, modules = [], members(module), our_modules(module)
    for node in module:
        if isinstance(node, ast.ImportFrom) and (node.level or is_ours(node.module)):
            found += [f"{node.lineno}: import of {alias.name}" for alias in node.names if is_private(alias.name)]
    for line, owner, name in private_uses(module):
        of_class = owner not in ("self", "cls", "super()") and name in all_members - own
        if owner in modules or is_ours(owner) or of_class:
            found.append(f"{line}: {owner}.{name}")
    return found


def test_no_module_uses_private_names_of_another():
    all_members = set().union(*(members(nodes(path)) for path in SOURCES))
    found = {name_of(path): strange_privates(nodes(path), all_members) for path in SOURCES}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from qerl.plan.plan import _trainer", ["1: import of _trainer"]),
        ("from qerl.plan import plan\nplan._trainer()", ["2: plan._trainer"]),
        ("def f(engine):\n    return engine._llm", ["2: engine._llm"]),
        ("def test(patch):\n    patch.setattr(Engine, '_llm', None)", ["2: Engine._llm"]),
        ("from qerl.plan import plan\ndef test(patch):\n    patch.setattr(plan, '_f', 0)", ["3: plan._f"]),
        ("def test(patch):\n    patch.setattr('qerl.plan.plan._f', 0)", ["2: qerl.plan.plan._f"]),
        ("import torch\ndef test(patch):\n    patch.setattr(torch, '_f', 0)", []),
        ("class Engine:\n    def f(self):\n        return self._llm", []),
        ("class Value:\n    _llm: int\n    def __eq__(self, other):\n        return self._llm == other._llm", []),
    ],
)
def test_what_counts_as_private_to_another(source, found):
    assert strange_privates(list(ast.walk(ast.parse(source))), {"_llm"}) == found
