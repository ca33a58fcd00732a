"""Formats of values as lines of text, for programs that read stdin and print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from generators.code.steps.base import StepKind


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """A format: `words` describe the lines; `read` and `write` are Python code with `{name}` for the value."""

    words: str
    read: str
    write: str


_COUNTED = "a line with how many {what} follow, then each on a line of its own"
LAYOUTS: Mapping[str, CodeLayout] = {
    "number": CodeLayout("a line with the number", "{name} = int(input())", "print({name})"),
    "numbers": CodeLayout(
        "a line with the numbers, spaces between them (an empty line for none)",
        "{name} = list(map(int, input().split()))",
        "print(*{name})",
    ),
    "words": CodeLayout(
        "a line with them, spaces between them (an empty line for none)", "{name} = input().split()", "print(*{name})"
    ),
    "text": CodeLayout("the text on a line", "{name} = input()", "print({name})"),
    "lines": CodeLayout(
        _COUNTED.format(what="lines"),
        "{name} = [input() for _ in range(int(input()))]",
        "for line in {name}:\n    print(line)",
    ),
    "rows": CodeLayout(
        _COUNTED.format(what="of them") + ", its numbers with spaces between them",
        "{name} = [list(map(int, input().split())) for _ in range(int(input()))]",
        "for row in {name}:\n    print(*row)",
    ),
    "table": CodeLayout(
        _COUNTED.format(what="names") + " with a space and its number behind it",
        "{name} = {{one: int(number) for one, number in (input().split() for _ in range(int(input())))}}",
        "for one in sorted({name}):\n    print(one, {name}[one])",
    ),
}
WRITTEN: Mapping[str, str] = {
    "rows": "each on a line of its own, its numbers with spaces between them (nothing for none)",
    "table": "each name on a line of its own with a space and its number behind it, in alphabetical order "
    "(nothing for none)",
}
"""Descriptions of printed values that differ from those of input."""


def as_input(kinds: Sequence[StepKind], values: Sequence[object]) -> str:
    """Return the values as the lines that a program reads."""
    return "".join(_lines(kind.layout, value) for kind, value in zip(kinds, values, strict=True))


def as_output(kind: StepKind, value: object) -> str:
    """Return a value as the lines that a program prints."""
    text = _lines(kind.layout, value)
    if kind.layout == "table":
        return "".join(sorted(text.splitlines(keepends=True)[1:], key=lambda line: line.split()[0]))
    return text.partition("\n")[2] if kind.layout in ("rows", "lines") else text


def _lines(layout: str, value: object) -> str:
    match value:
        case dict():
            lines = [f"{name} {number}" for name, number in value.items()]
        case list() if layout == "rows":
            lines = [" ".join(map(str, row)) for row in value]
        case list() if layout == "lines":
            lines = list(value)
        case list():
            return " ".join(map(str, value)) + "\n"
        case _:
            return f"{value}\n"
    return "".join(f"{line}\n" for line in (len(lines), *lines))
