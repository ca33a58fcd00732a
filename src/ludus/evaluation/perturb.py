"""The right answer in other writings, and answers near it that are wrong."""

from __future__ import annotations

import re
from fractions import Fraction

from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.types import Task

_UNITS = (
    *(("kg", "g"), ("km", "m"), ("cm", "mm"), ("hours", "minutes"), ("minutes", "seconds"), ("days", "weeks")),
    *(("euros", "dollars"), ("dollars", "euros"), ("am", "pm"), ("pm", "am"), ("%", " percentage points")),
)
_NUMBER = re.compile(r"\d+")


def plain_answer(task: Task) -> str | None:
    """The right answer of a task whose truth is one: a text, a number, or the first accepted answer."""
    truth = task.truth
    if isinstance(truth, ExpectedAnswers):
        return truth.accepted[0] if truth.accepted else None
    if isinstance(truth, str | int | float | Fraction) and not isinstance(truth, bool):
        return str(truth)
    return None


def same(answer: str) -> list[str]:
    """The answer in other case, with blanks around it, with a full stop, and in other characters."""
    wide = answer.replace(" ", "\u00a0")
    tried = [f"  {answer} ", f"{answer}\n", f"{answer}.", answer.upper(), answer.lower(), wide]
    return list(dict.fromkeys(text for text in tried if text != answer))


def other(task: Task, answer: str) -> list[str]:
    """Answers near the right one that are wrong: denied, another number, another unit, misspelt, cut.

    None of them is one that the truth of the task accepts.
    """
    tried = [f"not {answer}", f"{answer} or something else entirely", f"I doubt that it is {answer}"]
    if found := _NUMBER.search(answer):
        number = str(int(found[0]) + 1)
        tried += [answer[: found.start()] + number + answer[found.end() :], f"{answer}0"]
    for unit, wrong in _UNITS:
        if re.search(rf"(?<=\d)\s*{re.escape(unit)}(?!\w)", answer):
            tried.append(re.sub(rf"{re.escape(unit)}(?!\w)", wrong, answer))
    if len(answer) > 4 and not answer[0].isdigit():
        middle = len(answer) // 2
        tried += [answer[:middle].strip(), answer[:middle] + "qx" + answer[middle:]]
    right = [answer, *(task.truth.accepted if isinstance(task.truth, ExpectedAnswers) else ())]
    return [text for text in tried if normalise(text) not in map(normalise, right)]
