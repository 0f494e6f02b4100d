"""What mkdocs calls while it builds docs/, so that one set of pages serves a reader of the repository and of the site.

1. `<!-- made: NAME -->` in a page is replaced by what MADE reads from the source, so that it cannot become outdated.
2. A link to a recording or a source file that is alone on its line becomes that file's content. The copy button of a
   recording gives the commands without prompts and output.
3. Pages outside docs/ (PAGES) are part of the site.
4. A link to a source file leads to a page with that file; one to a folder or to data stays as its words.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# mkdocs imports this file by its path
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "scripts" / "docs", ROOT / "scripts" / "checks")]

import plan_check  # noqa: E402
from docs_commands import commands_page  # noqa: E402
from docs_errors import headings, messages  # noqa: E402
from docs_links import links, replace_links, target  # noqa: E402

from qerl.config.keys import describe_config  # noqa: E402
from qerl.data.tasks import TASKS  # noqa: E402
from training.preflight import seconds  # noqa: E402

# Pages of the site that lie elsewhere in the repository.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "benchmarks/README.md": "benchmarks.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".cu": "cpp", ".cuh": "cpp", ".toml": "toml"}
NO_PLACE = ("none: your rows, `--data FILE`", "generated, no download")  # of rows: whether a task generates them
EMBEDDED = re.compile(r"^( *)\[[^\]\n]*\]\(([^)#\n]+\.(?:txt|py))\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and the source files that pages link to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    origins = [
        *PAGES,
        *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_uri not in PAGES.values()),
    ]
    for path in sorted({path for origin in origins for path in _sources(origin)}):
        files.append(File.generated(config, _uri(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill in what is generated and what is embedded, and point each link to its page of the site."""
    uri = page.file.src_uri
    origin = next((path for path, name in PAGES.items() if name == uri), f"docs/{uri}")
    if uri.startswith("source/"):
        return markdown
    for name, made in MADE.items():
        if (mark := f"<!-- made: {name} -->") in markdown:
            markdown = markdown.replace(mark, made())
    markdown = markdown.replace("```text\n", "``` { .text .no-copy }\n")
    markdown = EMBEDDED.sub(lambda found: _embedded(target(origin, found[2]), found[1]), markdown)
    return replace_links(markdown, lambda found: _for_the_site(found, origin))


class SpelledOut(griffe.Extension):
    """Griffe's own extension for TypedDicts leaves out the fields of parents."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        for module in pkg["api"].modules.values():
            for parent in (module, *module.classes.values()):
                for function in parent.functions.values():
                    for last in [*function.parameters][-1:]:
                        if (kind := str(last.annotation)).startswith("Unpack["):
                            del function.parameters[last.name]
                            _spell_out(function, module[kind[len("Unpack[") : -1]])


def _spell_out(function: griffe.Function, fields: griffe.Class) -> None:
    shown = []
    for name, field in fields.all_members.items():
        if field.is_attribute:
            kind, words = griffe.ParameterKind.keyword_only, field.docstring.value
            function.parameters.add(griffe.Parameter(name, annotation=field.annotation, kind=kind, default="..."))
            shown.append(griffe.DocstringParameter(name, annotation=field.annotation, description=words))
    function.docstring.parsed.append(griffe.DocstringSectionParameters(shown))


def _embedded(path: str, indent: str) -> str:
    """The content of a file as code, to replace its link."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    if path.startswith("docs/recordings/"):
        text = "\n\n".join(_session(text))
    else:
        text = f"```{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n```"
    return textwrap.indent(text, indent)


def _session(text: str) -> Iterator[str]:
    """A recorded session as one block for each command, and one without a button for what it printed."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield f"```bash\n{command}\n```"
        if output.strip():
            lines = output.rstrip().strip("\n").splitlines()
            shown = "\n".join(line if len(line) < 101 or "│" in line else textwrap.fill(line, 88) for line in lines)
            yield f"``` {{ .text .no-copy }}\n{shown}\n```"


def _for_the_site(link: re.Match[str], origin: str) -> str:
    if not link[3]:
        return link[0]
    uri = _uri(target(origin, link[3]))
    if uri is None:
        return link[2]
    place = posixpath.relpath(uri, posixpath.dirname(_uri(origin) or "") or ".")
    return f"{link[1]}[{link[2]}]({place}{link[4] or ''})"


def _uri(path: str) -> str | None:
    """Where the site has a file of the repository, from the site's root; None if it has not."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else None


def _sources(origin: str) -> Iterator[str]:
    """The source files that a page links to."""
    for path, _ in links((ROOT / origin).read_text(encoding="utf-8")):
        found = target(origin, path)
        if (_uri(found) or "").startswith("source/"):
            yield found


def _source_page(path: str) -> str:
    code = _embedded(path, "")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{code}\n"


def keys_table() -> str:
    """Every key of a recipe, one table per section."""
    lines = []
    for section, keys in groupby(describe_config(), key=lambda key: key.key.split(".")[0]):
        lines += ["", f"## {section}", "", '<div class="keys" markdown>', ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [
            f'| <a id="{k.key}"></a>`{k.key}` | {_cell(k.type)} | `{_cell(k.default)}` | {_cell(k.description)} |'
            for k in keys
        ]
        lines += ["", "</div>"]
    return "\n".join(lines) + "\n"


def errors_list() -> str:
    """Every message with its own anchor, and a link to the section that explains it if there is one."""
    explained = headings((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    lines = []
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


def tasks_table() -> str:
    """Name and data set of each task."""
    rows = ["| task | data set on the hub | answers |", "|---|---|---|"]
    for name, task in TASKS.items():
        rows.append(f"| `{name}` | {task.place or NO_PLACE[bool(task.generate)]} | {task.answer_kind} |")
    return "\n".join(rows)


def constants() -> str:
    """The constants of the cost model: the lines that define them."""
    blocks = []
    for name in (
        "training/preflight/plan.py",
        "training/preflight/seconds.py",
        "qerl/plan/sizes.py",
        "qerl/plan/micro_batch_plan.py",
    ):
        lines = re.findall(r"^[A-Z][A-Z_, ]+ = [^{\n]*$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        blocks.append("\n".join([f"# {name}", *lines]))
    return "\n".join(["```python", "\n\n".join(blocks), "```"])


def seconds_model() -> str:
    """The formula of the seconds, from the docstring of training/preflight/seconds.py."""
    formula = textwrap.dedent("\n".join(line for line in seconds.__doc__.splitlines() if line.startswith("    ")))
    return f"```text\n{formula}\n```"


MADE = {
    "cards": lambda: re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)[1],
    "commands": commands_page,
    "keys": keys_table,
    "errors": errors_list,
    "tasks": tasks_table,
    "constants": constants,
    "seconds": seconds_model,
    "planned memory": plan_check.table,
    "planned seconds": plan_check.seconds_table,
    "planned decode": plan_check.decode_table,
    "scaled": plan_check.scaled_table,
}


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace(os.linesep, " ")


def _code(text: str) -> str:
    """The text for a <code> element in Markdown, with entities for characters that would be markup."""
    for character in "\\`*_[]":
        text = text.replace(character, f"&#{ord(character)};") if character != "&" else text
    return text.replace("<", "&lt;").replace(">", "&gt;")
