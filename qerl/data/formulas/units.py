"""Which words may follow a number without changing it: "18 dollars a day" states 18, "18 or 19" does not."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCALES = {
    "k": 10**3,
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

_MAX_WORDS = 8
_POWER = re.compile(r"(?<=[A-Za-z)])\s*(?:\^\s*\{?\s*-?[1-4]\s*\}?|[²³])")
_CHARS = re.compile(r"[A-Za-zµμΩÅ°'’\-./() $€£¥₹]*")

# One-character symbols that are units, unless letters are variables.
_LETTER_UNITS = _words("m g s h L l W V J N K C F A $ € £ ¥ ₹ ° '")
_SHORT_UNITS = _words("cm mm km kg mg ml ft in mi hr hrs min sec ms lb lbs oz mph sq cu usd yd am pm")
# Words that may occur within a unit ("18 dollars a day") but not at its start ("18a").
_INNER = _words("a t by than")
# Words that change the number before them, and words that are mathematics.
_ALTERS = _words(
    "and or to not no but if mod base factorial squared cubed half halves third thirds quarter quarters tenths "
    "hundredths thousandths plus minus times over divided less root pi ln log lg exp sin cos tan cot sec csc sqrt "
    "frac cdot infinity inf zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty "
    "fifty"
)
_VARIABLES = frozenset("abcdefghijklmnopqrstuvwxyz") - _INNER
_OF_VALUE = frozenset([*SCALES, *(f"{word}s" for word in SCALES), "percent"])


def is_unit(tail: str, algebra: bool) -> bool:
    """Whether the text after a literal is empty or a unit: words, slashes and small powers, but no mathematics.

    With `algebra`, a word of fewer than four letters is a product of variables unless it is a common unit.
    """
    tail = _POWER.sub("", tail)
    if not _CHARS.fullmatch(tail):
        return False
    if re.match(r"[.\-/(]", tail) and not re.match(r"[-(]?[A-Za-z]{2}", tail.replace("/", "", 1)):
        return False
    words = re.sub(r"[-/().]", " ", tail).split()
    if not words:
        return True
    if len(words) > _MAX_WORDS or any(_alters(word) for word in words):
        return False
    first = words[0]
    if algebra and first.isalpha() and len(first) < 4 and first.lower() not in _SHORT_UNITS:
        return False
    return first.lower() not in _INNER


def is_boxed_unit(text: str) -> bool:
    """Whether the content of a LaTeX text box is a unit; there a single letter is never a variable."""
    words = text.lower().replace(".", " ").split()
    return bool(words) and all(re.fullmatch(r"[a-z/²³]+", word) and word not in _ALTERS | _OF_VALUE for word in words)


def _alters(word: str) -> bool:
    return word.lower() in _ALTERS or (word.lower() in _VARIABLES and word not in _LETTER_UNITS)
