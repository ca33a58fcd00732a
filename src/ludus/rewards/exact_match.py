"""Verifiers of short answers: exact match and token F1 as in SQuAD, with aliases.

Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1. `normalise` lists the differences.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass

from ludus.rewards.base import truth_of
from ludus.rewards.extract import short_answers, without_invisible
from ludus.types import StopReason, Task, ToolStatus, Trajectory

_PRESERVED = re.compile(
    r"(?<![^\W\d])\.(?=\d)"  # a decimal point
    r"|(?<!\w)-(?=\.?\d)|(?<=\de)[-+](?=\d)"  # a sign before a number or its power of ten
    r"|(?<=\d)[-/:+*^](?=\d)"  # 3/4, 10:45, 1990-91
    r"|(?<=\d),(?=\d)(?!(?<=\d,)\d{3}(?!\d))"  # a comma that groups no thousands
    r"|(?<=[^\W\d])[+#]+(?!\w)"  # C++
)
_EXPONENT = re.compile(r"(?<=\d)[⁺⁻]?[⁰¹²³⁴-⁹]+")
"""Superscript exponents, which normalization must not merge with the digits."""
_VULGAR = re.compile(r"(?<=\d)[¼-¾⅐-⅞↉]")
"""The fraction of a mixed number."""
_DASH = re.compile(r"[\u2010-\u2015\u2212]")


@dataclass(frozen=True, slots=True)
class ExpectedAnswers:
    """The truth of a question with a short answer: all accepted spellings, the gold one first."""

    accepted: tuple[str, ...]


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation, English articles and extra blanks, as SQuAD does.

    In addition, accents and invisible characters are removed, punctuation includes Unicode's, and signs that
    change the answer are preserved: in numbers and dates (3.5, 3/4, 10:45, 1990-91, 10⁵ as 10^5; but 1,234 is
    1234) and after a letter (C++). A text of articles only is preserved: "A" is an answer.
    """
    plain = plain_words(text)
    return " ".join(re.sub(r"\b(a|an|the)\b(?![+#])", " ", plain).split()) or plain


def plain_words(text: str) -> str:
    """Normalise as `normalise` does, but without removing articles."""
    expanded = _VULGAR.sub(r" \g<0>", _EXPONENT.sub(r"^\g<0>", without_invisible(text)))
    folded = _DASH.sub("-", unicodedata.normalize("NFKD", expanded).casefold().replace("\N{FRACTION SLASH}", "/"))
    plain = "".join(c for c in folded if not unicodedata.combining(c))
    preserved = {i for match in _PRESERVED.finditer(plain) for i in range(*match.span())}
    signs = {c for c in plain if c in string.punctuation or unicodedata.category(c).startswith("P")}
    return " ".join("".join(c for i, c in enumerate(plain) if i in preserved or c not in signs).split())


def matches(answer: str, truth: ExpectedAnswers) -> bool:
    """Return whether the normalised answer equals one of the accepted ones and is not empty."""
    given = normalise(answer)
    return bool(given) and any(given == normalise(accepted) for accepted in truth.accepted)


def is_answer(answer: str, truth: ExpectedAnswers) -> bool:
    """Return whether the answer matches as a whole, or after extraction by `short_answers`.

    A box, "Answer:", "The answer is" and `<answer>` tags introduce answers. Every introduced answer must match.
    """
    if matches(answer, truth):
        return True
    found = short_answers(answer)
    return bool(found) and all(matches(one, truth) for one in found)


def f1(answer: str, truth: ExpectedAnswers) -> float:
    """Return the best token F1 over the accepted answers, in [0, 1]."""
    given, golds = Counter(normalise(answer).split()), [Counter(normalise(a).split()) for a in truth.accepted]
    shared = [((given & gold).total(), given.total() + gold.total()) for gold in golds]
    return max((2 * common / total for common, total in shared if common), default=0.0)


def exact_match(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer, extracted or whole, equals an accepted one after normalisation, else 0."""
    return float(is_answer(trajectory.answer, truth_of(task, ExpectedAnswers)))


def strict_match(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the whole final answer equals an accepted one after normalisation, else 0."""
    return float(matches(trajectory.answer, truth_of(task, ExpectedAnswers)))


def token_f1(task: Task, trajectory: Trajectory) -> float:
    """Return the token F1 of the final answer against the best accepted one, in [0, 1]."""
    return f1(trajectory.answer, truth_of(task, ExpectedAnswers))


def well_formed(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode ended with an answer and no tool call failed, else 0."""
    fine = all(outcome.status is ToolStatus.OK for outcome in trajectory.outcomes)
    return float(fine and trajectory.stop_reason is StopReason.ANSWERED)
