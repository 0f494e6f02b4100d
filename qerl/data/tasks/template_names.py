"""The names in braces of a prompt template: `{question}` is put in, and another one would be printed as it stands."""

from __future__ import annotations

import re

NAME = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
LITERAL = re.compile(r"(?:\\[A-Za-z]+\*?|[{}^_$\\\]])\Z")  # before braces of LaTeX (\boxed{x}, x^{n}) and doubled ones


def unknown_name(template: str) -> str | None:
    """The first name in braces that is not put in, such as `input` in "{question} {input}"; None if there is none.

    Braces that belong to LaTeX, or that hold white space, are text.
    """
    found = (match for match in NAME.finditer(template) if not LITERAL.search(template[: match.start()]))
    return next((match[1] for match in found if match[1] != "question"), None)


def unknown_text(name: str) -> str:
    """Why such a template cannot be used, and what to write."""
    return (
        f"{{{name}}} would be printed as it stands, since only {{question}} is put in: put the column {name} into the "
        f"question of each row, or write {{ {name} }} for the text in braces"
    )
