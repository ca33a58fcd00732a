"""Truths from JSON records: an answer, and a type that names its verifier.

| type | answer | also | verifier |
|---|---|---|---|
| number | a number, or a text that is or ends with one | | `number_close` |
| expression | LaTeX or plain text | | `mathematics` |
| text | a short text, or a list of accepted texts | | `exact_match`, of the extracted answer |
| choice | a letter, or the text of an option | `options`: texts, or texts by letter | `multiple_choice` |
| json | any value | `tolerance` | `json_value` |
| schema | a JSON schema | | `json_schema` |
| state | any value | `ignored` keys, `tolerance` | `same_state`, of the answer |
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from typing import Final

from ludus.rewards import json_match, multiple_choice
from ludus.rewards.exact_match import ExpectedAnswers, is_answer, normalise
from ludus.rewards.extract import candidates
from ludus.rewards.json_match import MatchState, Schema, Value
from ludus.rewards.math import math_verify, numeric
from ludus.rewards.math.math_verify import Expression
from ludus.rewards.math.numeric import Quantity, read_quantity
from ludus.rewards.multiple_choice import Choice
from ludus.types import JSON, Task, Trajectory

Truth = Quantity | Expression | ExpectedAnswers | Choice | Value | Schema | MatchState
TYPES: Final = ("number", "expression", "text", "choice", "json", "schema", "state")
_CLOSE: Final = 1e-9
"""Relative tolerance of a number that is not an integer."""
_VERIFIERS: Mapping[type, Callable[..., bool]] = {
    Quantity: numeric.is_close,
    Expression: math_verify.is_equal,
    ExpectedAnswers: is_answer,
    Choice: multiple_choice.is_right,
    Value: json_match.is_value,
    Schema: json_match.fits_schema,
    MatchState: json_match.is_state,
}


def read_truth(record: Mapping[str, JSON]) -> Truth:
    """Return the truth of a record.

    Without a type, an answer that parses as a number is a number, and any other an expression. Raises ValueError
    if the record is invalid, and UserError if the verifier needs an extra that is not installed.
    """
    type_, answer = record.get("type"), record.get("answer")
    if type_ not in (*TYPES, None):
        raise ValueError(f'"type" is {type_!r}, not one of {", ".join(TYPES)}')
    match type_:
        case "choice":
            return _choice(answer, record.get("options"))
        case "json":
            return Value(answer, _tolerance(record))
        case "schema" if isinstance(answer, dict):
            json_match.require_schema(answer)
            return Schema(answer)
        case "schema":
            raise ValueError('"answer" is not a JSON schema')
        case "state":
            return MatchState(answer, _ignored(record), _tolerance(record))
        case "text" if isinstance(answer, list):
            return _accepted(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError('"answer" is neither a text nor a number')
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError('"answer" is not a finite number')
    return _short(str(answer), type_)


def is_right(answer: str, truth: Truth) -> bool:
    """Return whether an answer is right, by the verifier of its truth."""
    return next(verify(answer, truth) for kind, verify in _VERIFIERS.items() if isinstance(truth, kind))


def by_record(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is right according to the type of the task's truth, else 0.

    Raises TypeError for a truth of any other type.
    """
    if not isinstance(task.truth, Truth):
        raise TypeError(f"task {task.id}: the truth is {type(task.truth).__name__}, not a type of truth of a record")
    return float(is_right(trajectory.answer, task.truth))


def question_text(question: str, truth: Truth) -> str:
    """Return the question, with the options of a choice below it, one per line."""
    if not isinstance(truth, Choice):
        return question
    return "\n".join([question, *(f"{letter}) {text}" for letter, text in truth.options.items())])


def _short(text: str, type_: JSON) -> Quantity | Expression | ExpectedAnswers:
    found = candidates(text)
    if len(found) != 1:
        raise ValueError('"answer" does not contain exactly one answer')
    (answer,) = found
    value = read_quantity(answer, Quantity(0.0))
    if type_ == "text":
        if not normalise(answer):
            raise ValueError(f"{answer[:60]!r} has no words to compare")
        return ExpectedAnswers((answer,))
    if type_ == "expression" or (type_ is None and value is None):
        return Expression(answer)
    if value is None:
        raise ValueError(f"{answer[:60]!r} is not a number")
    if value.denominator == 1:
        return Quantity(int(value), relative=0.0)
    try:
        return Quantity(float(value), relative=_CLOSE)
    except OverflowError as error:
        raise ValueError("the number is too large") from error


def _accepted(answers: list[JSON]) -> ExpectedAnswers:
    texts = tuple(answer for answer in answers if isinstance(answer, str) and normalise(answer))
    if not texts or len(texts) < len(answers):
        raise ValueError('"answer" must be a list of texts with words')
    return ExpectedAnswers(texts)


def _choice(answer: JSON, options: JSON) -> Choice:
    if isinstance(options, list):
        options = dict(zip(string.ascii_uppercase, options, strict=False)) if len(options) <= 26 else None
    if not isinstance(options, dict) or len(options) < 2:
        raise ValueError('"options" must be at least two texts, or texts by letter')
    texts = {letter: text for letter, text in options.items() if isinstance(text, str)}
    if texts.keys() != options.keys() or not texts.keys() <= set(string.ascii_uppercase):
        raise ValueError('"options" must map letters from A to Z to texts')
    letters = [letter for letter, text in texts.items() if answer in (letter, text)]
    if len(letters) != 1:
        raise ValueError(f'"answer" is {answer!r}, not one of the options')
    return Choice(letters[0], texts)


def _tolerance(record: Mapping[str, JSON]) -> float:
    tolerance = record.get("tolerance", 0.0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise ValueError(f'"tolerance" is {tolerance!r}, not a number from 0 to 1')
    return float(tolerance)


def _ignored(record: Mapping[str, JSON]) -> frozenset[str]:
    ignored = record.get("ignored", [])
    if not isinstance(ignored, list) or not all(isinstance(key, str) for key in ignored):
        raise ValueError('"ignored" is not a list of names of keys')
    return frozenset(map(str, ignored))
