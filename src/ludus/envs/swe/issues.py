"""The issue of a task: what a user would report, made of the failure of a test.

A report has the failing statement and what came out of it, and names no place in the code; how much else it
tells depends on its style.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from typing import Final

from ludus.envs.swe.trials import Said

_LONGEST: Final = 220
_NAME: Final = r"[A-Za-z_]\w*"


@dataclass(frozen=True, slots=True)
class Symptom:
    """What is seen. `call` is the code that shows it; `got` and `due` are empty where there are none.

    `subject` is the name that a user knows, `purpose` what it is for, in the words of its own docstring.
    """

    package: str
    call: str
    got: str
    due: str
    error: str
    subject: str
    purpose: str


def symptom_of(package: str, said: Said, context: str, subject: str, purpose: str) -> Symptom:
    """The symptom of a failed test; `context` are the lines that its statement needs."""
    call, due, turned = _asked(said.statement)
    kind, _, message = said.error.partition(": ")
    got = ""
    if kind == "AssertionError":
        got, seen = _compared(message)
        got, seen = (seen, got) if turned and seen else (got, seen)
        due = seen or due
        if due == got or not got:
            got = ""
    else:
        due = "" if _asserts(said.statement) == "" else due
    error = "" if got else f"{kind}: {message.splitlines()[0] if message else ''}".strip(": ")
    if kind == "AssertionError" and not got:
        error = ""
    elif kind == "Failed":
        error = ""
        due = f"{[*re.findall(_NAME, message.partition(chr(10))[0]), 'an error'][-2:][0]} is raised"
        got = "no exception at all"
    lines = [*context.splitlines(), *map(_cut, call.splitlines())]
    return Symptom(package, "\n".join(lines), _cut(got), _cut(due), _cut(error), subject, purpose)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    line = f"{' ' * (len(text) - len(text.lstrip()))}{line}"
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def _asserts(statement: str) -> str:
    return statement if statement.startswith(("assert", "self.assert")) else ""


def _asked(statement: str) -> tuple[str, str, bool]:
    """The code of a test's statement that uses the package, what it expects, and whether that came first."""
    try:
        node = ast.parse(
            statement.strip().rstrip(":") + (":\n pass" if statement.endswith(":") else "")
        ).body[0]
    except (SyntaxError, IndexError):
        return statement, "", False
    match node:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
            return _sides(left, right)
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=inner)):
            return ast.unparse(inner), "a false value", False
        case ast.Assert(test=test):
            return ast.unparse(test), "True", False
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name), args=[left, right, *_])) if (
            name.startswith("assert") and "Equal" in name
        ):
            return _sides(left, right)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="assertTrue"), args=[inner, *_])):
            return ast.unparse(inner), "True", False
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="assertFalse"), args=[inner, *_])):
            return ast.unparse(inner), "False", False
    return statement, "", False


def _sides(left: ast.expr, right: ast.expr) -> tuple[str, str, bool]:
    turned = isinstance(left, ast.Constant)
    left, right = (right, left) if turned else (left, right)
    return ast.unparse(left), ast.unparse(right), turned


def _compared(message: str) -> tuple[str, str]:
    """The two sides of what an assertion says; empty where they cannot be told."""
    first = next(iter(message.splitlines()), "")
    for pattern in (r"assert (?P<got>.+?) (?:==|is) (?P<due>.+)", r"(?P<got>.+?) != (?P<due>.+)"):
        if found := re.fullmatch(pattern, first):
            return found["got"], found["due"]
    if found := re.fullmatch(r"assert (?:not )?(?P<got>[^=<>]+)", first):
        return found["got"], ""
    if found := re.fullmatch(r"(True|False) is not (true|false)", first):
        return found[1], ""
    return "", ""


STYLES: Final = ("report", "short", "story", "regression", "question", "crash")


def write_issue(symptom: Symptom, named: bool, rng: random.Random) -> tuple[str, str]:
    """The style and the text of an issue. `named`: it may name the function and say what it is for."""
    choices = ("report", "short", "story", "regression", "question")
    style = "crash" if symptom.error and rng.random() < 0.5 else rng.choice(choices)
    if style == "short" and "\n" in symptom.call:
        style = "report"
    subject = f"`{symptom.subject}`" if named and symptom.subject else symptom.package
    purpose = f"\n\nIts documentation says: {symptom.purpose}" if named and symptom.purpose else ""
    text = _TEXTS[style].format(
        subject=subject,
        package=symptom.package,
        call=symptom.call.replace("\n", "\n    "),
        typed=symptom.call.replace("\n", "\n    >>> ").replace(">>>  ", "...  "),
        seen=_seen(symptom),
        due=_due(symptom),
        title=_title(symptom, subject, rng),
        error=symptom.error,
    )
    return style, f"{text}{purpose}"


def _seen(symptom: Symptom) -> str:
    if symptom.error:
        return f"it ends with `{symptom.error}`"
    return f"it gives `{symptom.got}`" if symptom.got else "the result is wrong"


def _due(symptom: Symptom) -> str:
    if symptom.due and symptom.due != symptom.got:
        return f"`{symptom.due}`" if " is raised" not in symptom.due else symptom.due
    return "no error" if symptom.error else "what the documentation promises"


def _title(symptom: Symptom, subject: str, rng: random.Random) -> str:
    if symptom.error:
        kind = symptom.error.partition(":")[0]
        return rng.choice((f"{kind} from {subject}", f"{subject} raises {kind} on valid input"))
    return rng.choice((f"Wrong result from {subject}", f"{subject} does not do what it should"))


_TEXTS: Final = {
    "report": "{title}\n\nTo reproduce:\n\n    {call}\n\nWhat happens: {seen}.\nWhat I expect: {due}.",
    "short": "{title}: with `{call}` {seen}. Should be: {due}.",
    "story": (
        "I use {package} in a small project and came across something odd. I evaluate\n\n    {call}\n\n"
        "and {seen}. I had counted on {due}. Could somebody look into it?"
    ),
    "regression": (
        "{title} (worked in the last release)\n\nAfter updating {package} one of my own checks broke:\n\n"
        "    {call}\n\nNow {seen}; before, it was {due}."
    ),
    "question": (
        "Is this a bug or am I holding it wrong? For\n\n    {call}\n\nI would say that the right outcome is "
        "{due}, but {seen}."
    ),
    "crash": "{title}\n\n    >>> {typed}\n    {error}\n\nNothing should go wrong here: I expect {due}.",
}
