"""Multiple choice: the letter of an option, its text, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.rewards.base import truth_of
from ludus.rewards.exact_match import plain_words
from ludus.rewards.extract import candidates
from ludus.types import Task, Trajectory

_LEAD = re.compile(
    r"(?i)^(?:(?:it\s+is|it's|i\s+choose|the(?:\s+(?:right|correct))?|correct|my)\s+)?"
    r"(?:(?:option|choice|answer)(?:\s+is\b)?)?\s*:?\s*"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")
_IS_RIGHT = (
    r"is\s+(?:right|correct|the\s+(?:(?:right|correct)\s+)?(?:answer|option|choice)"
    r"(?=\s*(?:[.,;!]|$)|\s+(?:because|since)\b))"
)
_HEAD = re.compile(
    r"[\s*_'\"‘“]*[(\[]?\s*([A-Za-z])\s*"
    rf"(?:[)\].:,;!*_'\"’”]+|\s[-–—]\s|$|(?=\s+(?:because|since|as|{_IS_RIGHT})\b))"
)
_TAIL = re.compile(r"(.*\S)\s*[(\[]([A-Za-z])[)\]][\s.!*_]*", re.S)
"""The text of an option followed by its letter in brackets."""
_DENIAL = re.compile(
    r"(?i)\b(?:not|no|never|neither|nor|none|wrong|incorrect|false|except|or|but|maybe|perhaps|unless|both|all|"
    r"eliminat\w*|exclud\w*|reject\w*|discard\w*|distract\w*|rul(?:e|ed|es|ing)\s+(?:it\s+)?out)\b|n't\b"
)
_REASON = re.compile(
    r"(?i)(?:,|[-\u2013\u2014])?\s*"
    rf"(?:because|since|as\s+(?:it|this|that|they|there|we)|{_IS_RIGHT})\b"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The truth of a question with options: the right letter, and the text of every option by its letter."""

    letter: str
    options: Mapping[str, str]


def chosen(text: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the only option that the text chooses; None if it chooses none or several.

    The text is an option's letter or text or both. A reason may follow ("because", "since", "as it",
    "is correct") if it names no other option and contains no denial.
    """
    words = plain_words(text)
    if not words or len(text) > 10_000:
        return None
    if same := [letter for letter, option in options.items() if plain_words(option) == words]:
        return same[0] if len(same) == 1 else None
    tail = _TAIL.fullmatch(text)
    if tail is not None and plain_words(tail[1]) == plain_words(options.get(tail[2].upper(), "")) != "":
        return tail[2].upper()
    plain = _LEAD.sub("", _TEXT.sub(r"\1", text).replace("$", ""), count=1)
    head = _HEAD.match(plain)
    if head is None or head[1].upper() not in options:
        return None
    letter, rest = head[1].upper(), plain[head.end() :].strip()
    if plain_words(rest) in ("", plain_words(options[letter])):
        return letter
    own = re.match(rf"\s*{re.escape(options[letter].strip())}(?!\w)\s*", rest, re.IGNORECASE)
    why = rest[own.end() :] if own else rest
    if not _REASON.match(why):
        return None
    others = {other: words for other, words in options.items() if other != letter}
    return None if _DENIAL.search(why) or _names(why, others) else letter


def _names(text: str, options: Mapping[str, str]) -> bool:
    """Return whether the text names one of the options, by its letter standing alone or by its text."""
    words = f" {plain_words(text)} "
    for letter, option in options.items():
        article = r"(?!\s+(?!(?:is|was|has|and|or)\b)[a-z])" if letter in "AI" else ""
        if re.search(rf"\({letter}\)|(?<!\w){letter}(?!\w){article}", text, re.IGNORECASE * (letter not in "AI")):
            return True
        if plain_words(option) and f" {plain_words(option)} " in words:
            return True
    return False


def is_right(answer: str, truth: Choice) -> bool:
    """Return whether the answer (all boxes of one with several) chooses the right option and no other."""
    found = candidates(answer)
    return bool(found) and all(chosen(one, truth.options) == truth.letter for one in found)


def multiple_choice(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer chooses the right option and no other, else 0."""
    return float(is_right(trajectory.answer, truth_of(task, Choice)))
