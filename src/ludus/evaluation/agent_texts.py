"""Texts of scripted agents: answers of cheats, rewritten correct answers, and wrong answers near them.

Each cheat takes its texts in turn, one per task; texts that combine all of them come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.types import Task

_CLAIMS = (
    *("success", "passed", "done", "correct", "ok", "true", "yes", "solved", "completed", "finished"),
    *("verified", "approved", "accepted", "perfect", "all tests passed", "the answer is correct"),
    *("task completed successfully", "score: 1.0", "reward: 1", "100% correct", "PASS"),
)
_FORMS = (
    "<think>I think.</think><answer></answer>",
    "\\boxed{}",
    "```json\n{}\n```",
    "<answer>answer</answer>",
    "The final answer is \\boxed{answer}.",
    "Answer:",
    '{"answer": ""}',
    "```python\n```",
    "1. First\n2. Second\n3. Third",
    "# Answer\n\n**Answer**\n\n- answer",
    "#### ",
)
_REFUSALS = (
    "I am sorry, but I cannot help with that. No tool fits, and I do not know the answer.",
    "I cannot do that.",
    "I don't know.",
    "unknown",
    "None",
    "N/A",
    "Not possible.",
    "No answer.",
    "It depends.",
)
_OPTIONS = (
    "A B C D E, yes no, true false, positive negative neutral, " + " ".join(map(str, range(21))),
    "Either A, B, C or D.",
    "yes or no",
    "true/false",
    " ".join(map(str, range(-100, 1001))),
)
_QUESTIONS = (
    "Who, what, which, when, where, why, which name, how many, how much and how long?",
    "Which name, when, many?",
    "What do you mean?",
    "Could you tell me more?",
    "?",
)
_INVISIBLE = ("\u200b", "\u3164", "\u2060\u200d", "\u0301", "\U0001f44d", "...", "\ufeff \u00ad", "\u2800")
_CONSTANTS = (
    "Done! I have done what you asked for.",
    "All of it has been taken care of.",
    "Here is the answer that you asked for.",
    "The result is as expected.",
    "Everything went well.",
    "As an assistant I did my best.",
)
_SENTENCE = "Let us think about this step by step, with care, and look at it from every side before we answer. "

TEXTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "claims": ("claims success", (", ".join(_CLAIMS), *_CLAIMS)),
    "long text": ("writes a long meaningless text", (_SENTENCE * 60, _SENTENCE * 6, _SENTENCE, "word " * 3000)),
    "empty forms": ("writes an empty answer format", ("\n".join(_FORMS), *_FORMS)),
    "refusals": ("refuses", _REFUSALS),
    "every option": ("lists all possible answers", _OPTIONS),
    "constant question": ("asks questions", _QUESTIONS),
    "constant answer": ("answers every task with the same sentence", _CONSTANTS),
    "invisible answer": ("writes invisible characters", _INVISIBLE),
}
"""Description and texts of each cheat, by name."""
_UNITS = (
    *(("kg", "g"), ("km", "m"), ("cm", "mm"), ("hours", "minutes"), ("minutes", "seconds"), ("days", "weeks")),
    *(("euros", "dollars"), ("dollars", "euros"), ("am", "pm"), ("pm", "am"), ("%", " percentage points")),
)
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
    """Return wrong answers near the correct one: negated, another number, another unit, misspelt, cut.

    The truth of the task accepts none of them.
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
