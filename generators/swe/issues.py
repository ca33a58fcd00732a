"""Issues of tasks: the report of a user, made from a snippet that shows the bug.

A report has the whole snippet and its outcome, and names no place in the code; the rest depends on its style. It names
nothing that its snippet does not define.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from generators.swe.snippets import SnippetOutcome


@dataclass(frozen=True, slots=True)
class Symptom:
    """Visible effect of a bug. `call` is the code that shows it; `got` is empty if it ends with `error`.

    `subject` is the name of the function for users, `purpose` the beginning of its docstring.
    """

    package: str
    call: str
    got: str
    due: str
    error: str
    subject: str
    purpose: str


def symptom_of(package: str, shown: SnippetOutcome, subject: str, purpose: str) -> Symptom:
    """Return the symptom that a snippet shows."""
    (kind, words), (due_kind, due) = shown.got, shown.due
    got, error = ("", words.rstrip(": ")) if kind == "error" else (words, "")
    if due_kind == "error":
        name = due.partition(":")[0]
        due = f"{'an' if name[0] in 'AEIOU' else 'a'} `{name}`"
    return Symptom(package, shown.snippet.text, got, due, error, subject, purpose)


STYLES: Final = ("report", "short", "story", "regression", "question", "crash")


def write_issue(symptom: Symptom, named: bool, rng: random.Random) -> tuple[str, str]:
    """Return the style and the text of an issue. `named`: it may name the function and quote its docstring."""
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
    return f"it gives `{symptom.got}`" if symptom.got != "no error" else "nothing is raised"


def _due(symptom: Symptom) -> str:
    plain = symptom.due == "no error" or symptom.due.startswith(("a `", "an `"))
    return symptom.due if plain else f"`{symptom.due}`"


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


def snippet_in(issue: str) -> str:
    """Return the code of an issue; empty if it has none."""
    lines = issue.split("\n")
    begin = next((i for i, line in enumerate(lines) if line.startswith("    ")), len(lines))
    end = next((i for i in range(begin, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
    code = [line[4:] for line in lines[begin:end]]
    if code and code[0].startswith(">>> "):
        code = [line[4:] for line in code if line.startswith((">>> ", "... ")) or line in (">>>", "...")]
    elif not code and "with `" in issue:
        code = [issue.partition("with `")[2].partition("` ")[0]]
    return "\n".join(code).strip()
