"""The errors that qerl raises, read from its source: errors.md lists them, and a test compares headings with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs_links import slugify

from qerl.base import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qerl", "quantize", "training", "eval")
RAISED = ("ConfigError", "CheckpointError", "DataError", "RewardError", "EngineError", "YamlError", "Conflict")
SHOWN_AS = {"YamlError": "ConfigError", "Conflict": "ConfigError"}  # what reaches the user
EXPLAINERS = ("unknown_key",)  # functions whose text becomes a ConfigError elsewhere
NAME = re.compile(r"[\w.]{1,24}")  # an expression short enough for a placeholder; any other is shown as ...
HEADING = re.compile(r"^### `(.+?)`$", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """One error: its class, its text with {placeholders}, and the file that raises it."""

    kind: str
    text: str
    file: str

    @property
    def anchor(self) -> str:
        """The id of its place on the page: its first words outside placeholders."""
        words = re.findall(r"[a-z0-9]+", re.sub(r"\{[^}]*\}", " ", self.text.lower()))
        return "-".join(words[:9])


def messages() -> list[Message]:
    """Every message once, in the order of classes, files and lines."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for message in _of_file(path):
                found.setdefault(message.text, message)
    kinds = list(dict.fromkeys(SHOWN_AS.get(kind, kind) for kind in RAISED))
    return sorted(found.values(), key=lambda message: kinds.index(message.kind))


def headings(text: str) -> list[tuple[str, str]]:
    """The words of the error and the anchor of each section of docs/troubleshooting.md."""
    return [(words, slugify(words)) for words in HEADING.findall(text)]


def _of_file(path: Path) -> Iterator[Message]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    file = str(path.relative_to(ROOT))
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for name in EXPLAINERS:
        yield from (Message("ConfigError", text, file) for text in _returned(functions.get(name)))
    for node in nodes:
        kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if kind not in RAISED or not node.args:
            continue
        texts = _conflict(node) if kind == "Conflict" else list(_texts(node.args[0]))
        if not texts and isinstance(node.args[0], ast.Call):
            texts = _returned(functions.get(ast.unparse(node.args[0].func)))
        for text in (_filled(text, node.args[1:]) for text in texts):
            if not re.search(r"[a-z]", re.sub(r"\{[^}]*\}", "", text)):
                continue  # placeholders alone: their content is a message elsewhere
            yield Message(SHOWN_AS.get(kind, kind), " ".join(text.split()), file)


def _returned(function: ast.FunctionDef | None) -> list[str]:
    nodes = ast.walk(function) if function else ()
    return [text for node in nodes if isinstance(node, ast.Return) for text in _texts(node.value)]


def _filled(text: str, arguments: list[ast.expr]) -> str:
    """The text of a message with each %s replaced: keys of the recipe by their names, other values by placeholders."""
    values = [each for one in arguments for each in (one.value.elts if isinstance(one, ast.Starred) else [one])]
    shown = iter(values)
    return re.sub(r"%[.\d]*[a-z]", lambda _: _value(next(shown, None)), text) if values else text


def _value(node: ast.expr | None) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set_to":
        (value,) = list(_texts(node.args[0])) or ["{...}"]
        return str(getattr(errors, node.func.value.id).set_to(value))
    if isinstance(node, ast.Name) and isinstance(key := getattr(errors, node.id, None), errors.Key):
        return str(key)
    shown = "" if node is None else ast.unparse(node)
    return f"{{{shown.rsplit('.', 1)[-1]}}}" if NAME.fullmatch(shown) else "{...}"


def _conflict(node: ast.Call) -> list[str]:
    """The keys, reasons and remedy of a Conflict, in the order in which it prints them."""
    values, why, write = node.args
    keys = [part for key in getattr(values, "keys", []) for part in _texts(key)] or ["{keys}"]
    named = " with ".join(f"{key} {{value}}" for key in keys)
    reasons, remedies = list(_texts(why)) or ["{why}"], list(_texts(write)) or ["{remedy}"]
    return [f"{named}: {reason}; write {remedies[0]}" for reason in reasons]


def _texts(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression can evaluate to: several for a conditional one, none if it is not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else _value(p.value) for p in node.values)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in _texts(node.left):
            for right in list(_texts(node.right)) or ["{...}"]:
                yield left + right
