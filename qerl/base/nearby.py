"""What errors say of a path that does not exist: what is beside it, and what may have been meant.

os.path is asked because it says no where pathlib raises: for a name that is too long, or a folder that may not be read.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

NAMED = 3  # neighbours that an error names


def expanded(ref: str) -> Path:
    """`ref` with the home folder for its `~`; unchanged if no user here has that name."""
    return Path(os.path.expanduser(ref))


def is_path(ref: str) -> bool:
    """Whether a `ref` that does not exist was meant as a path: by its form, or as its parent is a folder here."""
    return ref[:1] in ("/", ".", "~") or ref.count("/") > 1 or ("/" in ref and os.path.isdir(Path(ref).parent))


def no_folder(ref: str) -> str:
    """`there is no folder runs/dnoe (did you mean runs/done?)`."""
    path = expanded(ref)
    above = next((parent for parent in reversed(path.parents) if not os.path.exists(parent)), None)
    around = f"{above}/ is not there either" if above else close_to(ref) or _beside(path)
    return f"there is no folder {ref}{f' ({around})' if around else ''}"


def close_to(ref: str, files: bool = False) -> str:
    """`did you mean runs/done?`: folders (and files) of a similar name beside it; "" if there are none."""
    path = expanded(ref)
    names = {name.lower(): name for name in _names(path.parent, files)}
    found = [names[each] for each in difflib.get_close_matches(path.name.lower(), names, n=2)]
    return f"did you mean {' or '.join(str(path.parent / name) for name in found)}?" if found else ""


def _beside(path: Path) -> str:
    names = _names(path.parent)
    if not names:
        return ""
    others = f" and {len(names) - NAMED} others" if len(names) > NAMED + 1 else ""
    shown = names[:NAMED] if others else names
    return f"beside it: {', '.join(str(path.parent / name) for name in shown)}{others}"


def _names(parent: Path, files: bool = False) -> list[str]:
    try:
        return sorted(path.name for path in parent.iterdir() if (files or path.is_dir()) and path.name[:1] != ".")
    except OSError:
        return []
