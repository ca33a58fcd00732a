"""Where in a text the answer stands, for verifiers of numbers, mathematics and choices.

The answer is what stands in `\\boxed{...}`; without a box what follows the last "the answer is", "Answer:" or
"####"; without either the whole text. Nothing is searched for inside it: an answer that says more than the
answer is for the verifier to refuse.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARACTERS = 100_000
"""A longer text has no answer: nothing in it is looked at."""

_BOX = re.compile(r"\\f?boxed\s*\{")
_MARKER = re.compile(r"(?i)####|\b(?:final\s+answer|answer)(?:\s+is\b|\s*:|\s*=)\s*:?")
_MINUS = "\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"
_BLANK = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}"
_SIGNS = {ord(c): "-" for c in _MINUS} | {ord(c): " " for c in _BLANK}


def candidates(text: str) -> tuple[str, ...]:
    """What the text gives as its answer; all boxes of one with several, as all of them have to be right.

    Empty where there is no answer: an empty text or box, a brace that is not closed, too long a text.
    """
    if len(text) > MAX_CHARACTERS:
        return ()
    found = boxes(text)
    if found is None:
        return ()
    if not found:
        *_, last = [None, *_MARKER.finditer(text)]
        found = (text[last.end() :] if last else text,)
    stripped = tuple(_bare(one) for one in found)
    return stripped if all(stripped) else ()


def boxes(text: str) -> tuple[str, ...] | None:
    r"""The contents of all `\boxed{...}` that do not lie in another; None where a brace is not closed."""
    found = []
    at = 0
    while opening := _BOX.search(text, at):
        end = _closing(text, opening.end())
        if end is None:
            return None
        found.append(text[opening.end() : end])
        at = end
    return tuple(found)


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.S):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return start + brace.start()
    return None


def _bare(text: str) -> str:
    """Without blanks, emphasis and a full stop around it."""
    plain = text.strip().strip("*_`").strip()
    if plain.endswith("..."):
        return plain
    return plain.removesuffix(".").strip().strip("*_`").strip()


def plain_signs(text: str) -> str:
    """With ASCII digits, minus signs and blanks, without invisible characters.

    Digits of other scripts are digits; raised and lowered ones are not, as 7² is not 72.
    """
    decimals = (str(unicodedata.decimal(c)) if c.isdecimal() else c for c in without_invisible(text))
    return "".join(decimals).translate(_SIGNS)


def without_invisible(text: str) -> str:
    """Without characters that are not shown: format characters, and marks that choose how one is drawn."""
    return text if text.isascii() else "".join(c for c in text if not _is_invisible(c))


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"
