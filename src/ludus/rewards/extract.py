r"""Extract the text that a verifier judges, and the answers in it.

The text is the final answer, or the output of a tool or of the environment. An environment reports data that is
hidden from the model, such as its final state, as an outcome of its last `StepResult`:
`ToolOutcome("", "state", ToolStatus.OK, json.dumps(state))`. It is stored with the rollout, so that rewards can
be replayed, and does not count as a call (`Trajectory.call_outcomes`). If the model calls a nonexistent tool of
that name, the outcome is not OK and is ignored.

The answer is the content of `\boxed{...}`; without a box, the text after the last "the answer is", "Answer:"
or "####"; without either, the whole text. It is not searched any further: the verifier rejects an answer
with extra text. An answer that is denied or doubted ("I doubt that the answer is 7") does not count.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ludus.chat.parse_json import exceeds_depth
from ludus.types import JSON, ToolStatus, Trajectory

Evidence = Callable[[Trajectory], str]
"""Function that returns the text to judge, empty if there is none."""

MAX_JSON_CHARACTERS = 4_000_000
MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects in a JSON value."""
MAX_CHARACTERS = 100_000
"""Longer texts are treated as having no answer."""

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
"""Words after an answer that deny or doubt it."""
_CLAUSE = re.compile(r"[.!?;:,\n]")
_DENIAL_WORDS = 3
"""Number of words before a box that are searched for a denial."""
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s*\{([^{}]*)\}")
_MINUS = "\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"
_BLANK = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}"
_SIGNS = {ord(c): "-" for c in _MINUS} | {ord(c): " " for c in _BLANK}
MAX_FRAMES = 32
"""Maximum boxes and tags in a text; a text with more has no answer."""
_DENIAL_CHARS = 500
"""Characters around a frame that are searched for a denial."""
_FENCE = re.compile(r"(```|~~~)[a-zA-Z]*[ \t]*\r?\n(.*?)\1", re.S)


def final_answer(trajectory: Trajectory) -> str:
    """Return the model's answer."""
    return trajectory.answer


def last_output(tool: str) -> Evidence:
    """Return a function that reads the output of the last call of `tool`; empty if it failed or was truncated."""

    def read(trajectory: Trajectory) -> str:
        last = next((outcome for outcome in reversed(trajectory.outcomes) if outcome.tool == tool), None)
        return last.output if last is not None and last.status is ToolStatus.OK and not last.truncated else ""

    return read


def fenced_block(text: str) -> str:
    """Return the content of the only fenced block; the whole text if there is none; empty if there are several."""
    blocks = [match[2] for match in _FENCE.finditer(text)] or [text]
    return blocks[0].strip() if len(blocks) == 1 else ""


class NotJson(ValueError):
    """The text is not a JSON value: malformed, too deep or long, with a duplicate key, or with NaN."""


def read_json(text: str) -> JSON:
    """Parse the whole text as strict JSON. Raises NotJson."""
    if len(text) > MAX_JSON_CHARACTERS:
        raise NotJson("too long")
    try:
        value: JSON = json.loads(text, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error
    if exceeds_depth(value, MAX_DEPTH - 1):
        raise NotJson("nested too deep")
    return value


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise NotJson("a duplicate key")
    return found


def _finite(numeral: str) -> JSON:
    value = float(numeral)
    if not math.isfinite(value):
        raise NotJson(numeral)
    return value


class _Frame(NamedTuple):
    """A box or tag `text[start:after]` with the content `text[inner:end]`; `nested` if inside another."""

    start: int
    inner: int
    end: int
    after: int
    nested: bool = False


def candidates(text: str) -> tuple[str, ...]:
    """Return the answers of a text: all boxes if there are several, since all must be right.

    Without a box, those of all `<answer>` tags. Empty for an empty text or box, an unclosed brace, or a text
    that is too long.
    """
    if len(text) > MAX_CHARACTERS:
        return ()
    boxed, tags = _boxes(text), _tags(text)
    if boxed is None or _is_denied(text, (*boxed, *tags)):
        return ()
    *_, last = [None, *_MARKER.finditer(text)]
    found = _outer(text, boxed) or _outer(text, tags)
    if not found and last and _is_doubted(text, last.start()):
        return ()
    stripped = tuple(map(_bare, found or (text[last.end() :] if last else text,)))
    return stripped if all(stripped) else ()


def short_answers(text: str) -> tuple[str, ...]:
    """Return the short answers (such as names) of a text, as `candidates` does, also from `<answer>` tags.

    If several markers introduce answers, all are returned: a second answer is a hedge. After a marker other than
    the last one only the first sentence counts, and in it the text before a box or tag.
    """
    boxed = _boxes(text) if len(text) <= MAX_CHARACTERS else None
    tags = _tags(text) if boxed is not None else []
    if boxed is None or _is_denied(text, (*boxed, *tags)):
        return ()
    marks = list(islice(_MARKER.finditer(text), MAX_FRAMES + 1))
    if len(marks) > MAX_FRAMES or any(_is_doubted(text, mark.start()) for mark in marks):
        return ()
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    texts = [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]
    early = [re.split(r"[.!?;\n]\s", f"{one.strip()} ")[0] for one in texts[:-1]]
    plain = filter(None, map(_cut_at_frame, (*early, *texts[-1:])))
    found = (*_outer(text, tags), *_outer(text, boxed), *plain) or (text,)
    stripped = tuple(_bare(_TEXT.sub(r"\1", _bare(one).strip("$")).strip()) for one in found)
    return stripped if all(stripped) else ()


def _cut_at_frame(text: str) -> str:
    """Return the text before the first box or tag, or the whole text."""
    opening = _BOX.search(text)
    start = opening.start() if opening else next((tag.start for tag in _tags(text)), None)
    return text or " " if start is None else text[:start].strip(" *_`$\n")


def _is_doubted(text: str, at: int) -> bool:
    """Return whether the clause before a marker denies or doubts it."""
    clause = _CLAUSE.split(text[max(0, at - _DENIAL_CHARS) : at])[-1]
    return _DOUBT.search(_CERTAIN.sub("", clause)) is not None


def _is_denied(text: str, frames: Sequence[_Frame]) -> bool:
    """Return whether a denial directly precedes or follows a box or tag, or whether there are too many to check."""
    if len(frames) > MAX_FRAMES:
        return True
    for frame in frames:
        before = _CLAUSE.split(text[max(0, frame.start - _DENIAL_CHARS) : frame.start])[-1].split()[-_DENIAL_WORDS:]
        after = _CLAUSE.split(text[frame.after : frame.after + _DENIAL_CHARS].lstrip("}$*_ "))[0]
        denial = " ".join(after.split()[: _DENIAL_WORDS + 1]) if _IS_DENIED.search(after) else ""
        if any(_DOUBT.search(_CERTAIN.sub("", one)) for one in (" ".join(before), f"so {denial}")):
            return True
    return False


def boxes(text: str) -> tuple[str, ...] | None:
    r"""Return the contents of all outermost `\boxed{...}`; None if a brace is not closed."""
    found = _boxes(text)
    return None if found is None else _outer(text, found)


def _outer(text: str, frames: Sequence[_Frame]) -> tuple[str, ...]:
    return tuple(text[frame.inner : frame.end] for frame in frames if not frame.nested)


def _boxes(text: str) -> list[_Frame] | None:
    """Return the frames of all boxes, nested ones included; None if a brace is not closed."""
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
    """Return the frames from each `<answer>` to the next `</answer>`."""
    found: list[_Frame] = []
    at = 0
    while (opening := _TAG.search(text, at)) and (closing := _END_TAG.search(text, opening.end())):
        found.append(_Frame(*opening.span(), *closing.span()))
        at = closing.end()
    return found


def _bare(text: str) -> str:
    """Strip blanks, emphasis and a final full stop."""
    plain = text.strip().strip("*_`").strip()
    if plain.endswith("..."):
        return plain
    return plain.removesuffix(".").strip().strip("*_`").strip()


def plain_signs(text: str) -> str:
    """Return the text with ASCII digits, minus signs and blanks, without invisible characters.

    Digits of other scripts are converted; superscripts and subscripts are not, since 7² is not 72.
    """
    decimals = (str(unicodedata.decimal(c)) if c.isdecimal() else c for c in without_invisible(text))
    return "".join(decimals).translate(_SIGNS)


def without_invisible(text: str) -> str:
    """Remove characters that are not displayed: format characters and variation selectors."""
    if text.isascii():
        return text
    return "".join(c for c in text if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
