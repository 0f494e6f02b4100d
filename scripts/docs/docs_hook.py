"""What mkdocs calls while it builds docs/: the pages that are made from the source, so that they cannot drift from it.

recipe-keys.md comes from the descriptions in qerl/config/schema.py, errors.md from the messages in the source;
`{{recipes}}` and the like in a page (PLACEHOLDERS) stand for what is read from the source.
"""

from __future__ import annotations

import html
import os
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# mkdocs imports this file by its path
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "scripts" / "docs", ROOT / "scripts" / "checks")]

import plan_check  # noqa: E402
from docs_errors import headings, messages  # noqa: E402

from qerl.config.keys import describe_config  # noqa: E402
from qerl.config.recipe import recipe_names, recipe_path  # noqa: E402
from qerl.plan import plan  # noqa: E402
from qerl.tasks import TASKS  # noqa: E402


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Included files are named from the repository's root, wherever mkdocs was started."""
    config.mdx_configs["pymdownx.snippets"]["base_path"] = [str(ROOT)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file holds."""
    for name, content in (("recipe-keys.md", keys_page()), ("errors.md", errors_page())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the lists."""
    for name, made in PLACEHOLDERS.items():
        if name in markdown:
            markdown = markdown.replace(name, made())
    return markdown


def keys_page() -> str:
    """Every key of a recipe, a table a section."""
    lines = [
        "# Every key of a recipe",
        "",
        "Made from the descriptions in `qerl/config/schema.py`; `qerl recipes keys` prints the same. A recipe states "
        "only what differs from the defaults.",
    ]
    for section, keys in groupby(describe_config(), key=lambda key: key.key.split(".")[0]):
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [
            f'| <a id="{k.key}"></a>`{k.key}` | {_cell(k.type)} | `{_cell(k.default)}` | {_cell(k.description)} |'
            for k in keys
        ]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Every message with an anchor of its own, and a link to the section that explains it, where there is one."""
    explained = headings((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    lines = [
        "# Every error",
        "",
        "Made from the source. An error is one line that says what was given, why it cannot work, and what to write "
        "instead; the exit code is 2. `{name}` stands for what was given. "
        "[Troubleshooting](troubleshooting.md) explains those that need more than a line.",
    ]
    taken: set[str] = set()
    for kind, group in groupby(messages(), key=lambda message: message.kind):
        lines += ["", f"## {kind}", ""]
        for message in group:
            anchor = message.anchor
            while anchor in taken:
                anchor += "-2"
            taken.add(anchor)
            section = next((place for words, place in explained if words in message.text), None)
            more = f" [More](troubleshooting.md#{section})" if section else ""
            lines.append(f'- <a id="{anchor}"></a><code>{_code(message.text)}</code> ({message.file}){more}')
    return "\n".join(lines) + "\n"


def recipes_table() -> str:
    """Name and first line of each shipped recipe."""
    rows = []
    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").splitlines()[0]
        rows.append(f"| `{name}` | {_cell(first.removeprefix('#').strip())} |")
    return "\n".join(["| recipe | what it is |", "|---|---|", *rows])


def tasks_table() -> str:
    """Name and data set of each task."""
    rows = [
        f"| `{name}` | {task.place or 'generated, no download'} | {task.answer_kind} |" for name, task in TASKS.items()
    ]
    return "\n".join(["| task | data set on the hub | answers |", "|---|---|---|", *rows])


def constants() -> str:
    """The constants of the cost model: the lines that define them."""
    blocks = []
    for name in ("qerl/plan/plan.py", "qerl/plan/micro_batch_plan.py"):
        lines = re.findall(r"^[A-Z][A-Z_, ]+ = [^{\n]*$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        blocks.append("\n".join([f"# {name}", *lines]))
    return "\n\n".join(blocks)


def seconds_model() -> str:
    """The formula of the seconds, from the docstring of qerl/plan/plan.py."""
    return textwrap.dedent("\n".join(line for line in plan.__doc__.splitlines() if line.startswith("    ")))


PLACEHOLDERS = {
    "{{recipes}}": recipes_table,
    "{{tasks}}": tasks_table,
    "{{constants}}": constants,
    "{{seconds}}": seconds_model,
    "{{planned}}": plan_check.table,
    "{{planned seconds}}": plan_check.seconds_table,
    "{{planned decode}}": plan_check.decode_table,
    "{{scaled}}": plan_check.scaled_table,
}


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace(os.linesep, " ")


def _code(text: str) -> str:
    """For inside <code> in Markdown: what would be markup there is written as entities."""
    for character in "\\`*_[]":
        text = text.replace(character, f"&#{ord(character)};") if character != "&" else text
    return text.replace("<", "&lt;").replace(">", "&gt;")
