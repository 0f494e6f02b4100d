"""Relative links and anchors of a Markdown page, as GitHub reads them: for the built site and for the test of links."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|/)([^)\s#]*)(#[^)\s]*)?\)")
CODE = re.compile(r"^( *)```.*?^\1```[ \t]*$|``[^`]+``|`[^`\n]+`|<!--.*?-->", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```[ \t]*$", re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[tuple[str, str]]:
    """The path, and the anchor without #, of each relative link and picture outside code; either may be empty."""
    for match in LINK.finditer(without_code(text)):
        yield match[3], (match[4] or "").removeprefix("#")


def without_code(text: str) -> str:
    """The text with its code replaced by as many spaces, so that positions stay the same."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def replace_links(text: str, new: Callable[[re.Match[str]], str]) -> str:
    """The text with `new(match)` for each match of LINK outside code."""
    shown = without_code(text)
    parts, end = [], 0
    for match in LINK.finditer(shown):
        same = LINK.match(text, match.start())  # in the original text, because the label may contain code
        if same is not None:
            parts += [text[end : match.start()], new(same)]
            end = same.end()
    return "".join([*parts, text[end:]])


def target(page: str, path: str) -> str:
    """The file that a link on `page` names, both from the repository's root; the page itself for an empty path."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page


def anchors(text: str) -> set[str]:
    """The anchors that a link may name after #: headings as GitHub spells them, and explicit ids."""
    text = FENCED.sub("", text)
    count: Counter[str] = Counter()
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in HEADING.findall(text):
        slug = slugify(heading)
        found.add(f"{slug}-{count[slug]}" if count[slug] else slug)
        count[slug] += 1
    return found


def slugify(heading: str) -> str:
    """The anchor of a heading, by a rule on which GitHub and mkdocs agree unless two spaces or dashes are adjacent."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|<[^>]*>", r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip())
