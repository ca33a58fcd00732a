"""Where in a text the answer stands, for verifiers of numbers, mathematics and choices.

The answer is what stands in `\\boxed{...}`; without a box what follows the last "the answer is", "Answer:" or
"####"; without either the whole text. Nothing is searched for inside it: an answer that says more than the
answer is for the verifier to refuse. A frame that is denied or doubted ("I doubt that the answer is 7") holds
no answer.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import islice

MAX_CHARACTERS = 100_000
"""A longer text has no answer: nothing in it is looked at."""

_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_MARKER = re.compile(
    r"(?im)####|^[#*_\s]*\b(?:final\s+)?answer[*_]*[^\S\n]*\n"
    r"|\b(?:final\s+)?answer(?:\s+to\s+(?:the|this|your)\s+question)?(?:\s+is\b|[*_]*\s*[:\uff1a=])\s*[:\uff1a]?"
)
_TAG = re.compile(r"(?is)<answer>(.*?)</answer>")
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


def candidates(text: str) -> tuple[str, ...]:
    """What the text gives as its answer; all boxes of one with several, as all of them have to be right.

    Without a box those of all `<answer>` tags. Empty where there is no answer: an empty text or box, a brace
    that is not closed, too long a text.
    """
    if len(text) > MAX_CHARACTERS:
        return ()
    found = boxes(text)
    if found is None or _is_denied(text):
        return ()
    if not found:
        found = tuple(_TAG.findall(text))
    if not found:
        *_, last = [None, *_MARKER.finditer(text)]
        if last and _is_doubted(text[: last.start()]):
            return ()
        found = (text[last.end() :] if last else text,)
    stripped = tuple(_bare(one) for one in found)
    return stripped if all(stripped) else ()


def short_answers(text: str) -> tuple[str, ...]:
    """What a text gives as its short answer, such as a name: as `candidates`, and out of `<answer>` tags.

    Where several frames hold answers, all of them: a second answer is a hedge. Of what follows a marker other
    than the last one the first sentence counts, and what stands before a box or tag in it.
    """
    held = boxes(text) if len(text) <= MAX_CHARACTERS else None
    marks = [*_MARKER.finditer(text)] if held is not None else []
    if held is None or _is_denied(text) or any(_is_doubted(text[: mark.start()]) for mark in marks):
        return ()
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    said = [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]
    early = [re.split(r"[.!?;\n]\s", f"{one.strip()} ")[0] for one in said[:-1]]
    plain = filter(None, map(_before_frame, (*early, *said[-1:])))
    found = (*_TAG.findall(text), *held, *plain) or (text,)
    stripped = tuple(_bare(_TEXT.sub(r"\1", _bare(one).strip("$")).strip()) for one in found)
    return stripped if all(stripped) else ()


def _before_frame(text: str) -> str:
    """The text, or what stands before the box or tag in it."""
    frame = _BOX.search(text) or _TAG.search(text)
    return text[: frame.start()].strip(" *_`$\n") if frame else text or " "


def _is_doubted(before: str) -> bool:
    """Whether the clause that a marker stands in denies or doubts it."""
    return _DOUBT.search(_CERTAIN.sub("", _CLAUSE.split(before)[-1])) is not None


def _is_denied(text: str) -> bool:
    """Whether a denial stands right before or behind a box or tag, or there are too many of these to tell."""
    opened = [box.span() for box in islice(_BOX.finditer(text), MAX_FRAMES + 1)]
    tags = [tag.span() for tag in islice(_TAG.finditer(text), MAX_FRAMES + 1)]
    if len(opened) + len(tags) > MAX_FRAMES:
        return True
    frames = [(start, _closing(text, end) or len(text)) for start, end in opened] + tags
    for start, end in frames:
        before = _CLAUSE.split(text[max(0, start - _NEAR) : start])[-1].split()[-_DENIED:]
        behind = _CLAUSE.split(text[end : end + _NEAR].lstrip("}$*_ "))[0]
        said = " ".join(behind.split()[: _DENIED + 1]) if _IS_DENIED.search(behind) else ""
        if any(_DOUBT.search(_CERTAIN.sub("", one)) for one in (" ".join(before), f"so {said}")):
            return True
    return False


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
