"""Texts of scripted agents: answers of cheats, rewritten correct answers, and wrong answers near them.

Each cheat uses one text per task, in order; a text that combines all others comes first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from fractions import Fraction
from importlib import resources

from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.types import Task

_NUMBERS = " ".join(map(str, range(-100, 1001)))
_Texts = tuple[str, tuple[str, ...]]


def _read() -> tuple[dict[str, _Texts], dict[str, str], dict[str, str], list[tuple[str, str]]]:
    """Return the cheats, programs, test files and units of the data file."""
    data = tomllib.loads(resources.files(__package__).joinpath("agent_texts.toml").read_text("utf-8"))
    cheats = {name: _cheat(**record) for name, record in data["cheats"].items()}
    return cheats, data["programs"], data["tests"], data["units"]["replaced"]


def _cheat(what: str, texts: Sequence[str], join: str = "", times: Sequence[int] = ()) -> _Texts:
    first = [join.join(texts)] if join else []
    filled = (text.replace("{numbers}", _NUMBERS) for text in texts)
    return what, (*first, *(text * num for text, num in zip(filled, times or [1] * len(texts), strict=True)))


TEXTS, PROGRAMS, TESTS, _UNITS = _read()
"""Cheats (description and texts), no-op programs that report success, and test files that always pass, by name."""
_NUMBER = re.compile(r"\d+")


def plain_answer(task: Task) -> str | None:
    """Return the correct answer if the truth of a task is one: a text, a number, or the first accepted answer."""
    truth = task.truth
    if isinstance(truth, ExpectedAnswers):
        return truth.accepted[0] if truth.accepted else None
    if isinstance(truth, str | int | float | Fraction) and not isinstance(truth, bool):
        return str(truth)
    return None


def rewritten(answer: str) -> list[str]:
    """Return the answer with other case, spacing, a full stop, and other characters."""
    wide = answer.replace(" ", "\u00a0")
    tried = [f"  {answer} ", f"{answer}\n", f"{answer}.", answer.upper(), answer.lower(), wide]
    return list(dict.fromkeys(text for text in tried if text != answer))


def near_misses(task: Task, answer: str) -> list[str]:
    """Return wrong answers near the correct one, all not accepted: negated, other number or unit, misspelt, cut."""
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
