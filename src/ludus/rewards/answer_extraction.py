"""Where in a text the answer stands, for verifiers of numbers, mathematics and choices.

The answer is what stands in `\\boxed{...}`; without a box what follows the last "the answer is", "Answer:" or
"####"; without either the whole text. Nothing is searched for inside it: an answer that says more than the
answer is for the verifier to refuse. A frame that is denied or doubted ("I doubt that the answer is 7") holds
no answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

MAX_CHARACTERS = 100_000
"""A longer text has no answer: nothing in it is looked at."""

_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_MARKER = re.compile(
    r"(?im)####|^[#*_ \t]*+\b(?:final\s+)?answer[*_]*[^\S\n]*\n"
    r"|\b(?:final\s+)?answer(?:\s+to\s+(?:the|this|your)\s+question)?(?:\s+is\b|[*_]*\s*[:\uff1a=])\s*[:\uff1a]?"
)
_TAG = re.compile(r"(?i)<answer>")
_END_TAG = re.compile(r"(?i)</answer>")
_BRACE = re.compile(rf"(?s){_BOX.pattern}|\\.|[{{}}]")
_DOUBT = re.compile(
    r"(?i)\b(?:not|never|cannot|doubt\w*|deny|denies|wrong|false|untrue|incorrect|unlikely|whether|if|unless)\b"
    r"|\b(?:maybe|perhaps|possibly|probably|presumably|might|could|may|unclear|unsure|hardly|neither|nor)\b"
    r"|\b(?:refus\w*|reject\w*|nobody|no one|none|nothing)\b|n['’]t\b"
    r"|^\W*(?:who|why|how|is|does|do|did|can|would|should)\b"  # a question
)
_CERTAIN = re.compile(r"(?i)\b(?:no|without(?: an?y?)?|beyond(?: an?y?)?) doubt\b")
_IS_DENIED = re.compile(r"(?i)^\W*(?:(?:is|was|are|seems|looks)\b|(?:isn|wasn|can)['’]t\b|cannot\b)")
"""What says something of the frame that it follows."""
_CLAUSE = re.compile(r"[.!?;:,\n]")
_DENIED = 3
"""Words before a box in which a denial counts."""
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s*\{([^{}]*)\}")
_MINUS = "\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"
_BLANK = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}"
_SIGNS = {ord(c): "-" for c in _MINUS} | {ord(c): " " for c in _BLANK}


MAX_FRAMES = 32
"""Boxes and tags of one text; a text with more has no answer."""
_NEAR = 500
"""Characters around a frame in which a denial is looked for."""


class _Frame(NamedTuple):
    """A box or tag `text[start:after]` with the content `text[inner:end]`; whether it lies in another."""

    start: int
    inner: int
    end: int
    after: int
    nested: bool = False


def candidates(text: str) -> tuple[str, ...]:
    """What the text gives as its answer; all boxes of one with several, as all of them have to be right.

    Without a box those of all `<answer>` tags. Empty where there is no answer: an empty text or box, a brace
    that is not closed, too long a text.
    """
    if len(text) > MAX_CHARACTERS:
        return ()
    held, tags = _boxes(text), _tags(text)
    if held is None or _is_denied(text, (*held, *tags)):
        return ()
    found = _outer(text, held) or _outer(text, tags)
    if not found:
        *_, last = [None, *_MARKER.finditer(text)]
        if last and _is_doubted(text, last.start()):
            return ()
        found = (text[last.end() :] if last else text,)
    stripped = tuple(_bare(one) for one in found)
    return stripped if all(stripped) else ()


def short_answers(text: str) -> tuple[str, ...]:
    """What a text gives as its short answer, such as a name: as `candidates`, and out of `<answer>` tags.

    Where several frames hold answers, all of them: a second answer is a hedge. Of what follows a marker other
    than the last one the first sentence counts, and what stands before a box or tag in it.
    """
    held = _boxes(text) if len(text) <= MAX_CHARACTERS else None
    tags = _tags(text) if held is not None else []
    if held is None or _is_denied(text, (*held, *tags)):
        return ()
    marks = list(islice(_MARKER.finditer(text), MAX_FRAMES + 1))
    if len(marks) > MAX_FRAMES or any(_is_doubted(text, mark.start()) for mark in marks):
        return ()
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    said = [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]
    early = [re.split(r"[.!?;\n]\s", f"{one.strip()} ")[0] for one in said[:-1]]
    plain = filter(None, map(_before_frame, (*early, *said[-1:])))
    found = (*_outer(text, tags), *_outer(text, held), *plain) or (text,)
    stripped = tuple(_bare(_TEXT.sub(r"\1", _bare(one).strip("$")).strip()) for one in found)
    return stripped if all(stripped) else ()


def _before_frame(text: str) -> str:
    """The text, or what stands before the box or tag in it."""
    opening = _BOX.search(text)
    start = opening.start() if opening else next((tag.start for tag in _tags(text)), None)
    return text or " " if start is None else text[:start].strip(" *_`$\n")


def _is_doubted(text: str, at: int) -> bool:
    """Whether the clause before a marker denies or doubts it."""
    clause = _CLAUSE.split(text[max(0, at - _NEAR) : at])[-1]
    return _DOUBT.search(_CERTAIN.sub("", clause)) is not None


def _is_denied(text: str, frames: Sequence[_Frame]) -> bool:
    """Whether a denial stands right before or behind a box or tag, or there are too many of these to tell."""
    if len(frames) > MAX_FRAMES:
        return True
    for frame in frames:
        before = _CLAUSE.split(text[max(0, frame.start - _NEAR) : frame.start])[-1].split()[-_DENIED:]
        behind = _CLAUSE.split(text[frame.after : frame.after + _NEAR].lstrip("}$*_ "))[0]
        said = " ".join(behind.split()[: _DENIED + 1]) if _IS_DENIED.search(behind) else ""
        if any(_DOUBT.search(_CERTAIN.sub("", one)) for one in (" ".join(before), f"so {said}")):
            return True
    return False


def boxes(text: str) -> tuple[str, ...] | None:
    r"""The contents of all `\boxed{...}` that do not lie in another; None where a brace is not closed."""
    found = _boxes(text)
    return None if found is None else _outer(text, found)


def _outer(text: str, frames: Sequence[_Frame]) -> tuple[str, ...]:
    return tuple(text[frame.inner : frame.end] for frame in frames if not frame.nested)


def _boxes(text: str) -> list[_Frame] | None:
    """All boxes, nested ones too; None where the brace of one is not closed."""
    found: list[_Frame] = []
    at = 0
    while opening := _BOX.search(text, at):
        opened: list[re.Match[str] | None] = [opening]
        for brace in _BRACE.finditer(text, opening.end()):
            if brace[0] == "}":
                if box := opened.pop():
                    found.append(_Frame(box.start(), box.end(), brace.start(), brace.end(), bool(opened)))
                if not opened:
                    at = brace.end()
                    break
            elif brace[0].endswith("{") and brace[0] != "\\{":
                opened.append(None if brace[0] == "{" else brace)
        else:
            return None
    return found


def _tags(text: str) -> list[_Frame]:
    """What stands between `<answer>` and the next `</answer>`."""
    found: list[_Frame] = []
    at = 0
    while (opening := _TAG.search(text, at)) and (closing := _END_TAG.search(text, opening.end())):
        found.append(_Frame(*opening.span(), *closing.span()))
        at = closing.end()
    return found


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
