"""Pages of the applications, and their renderings as an accessibility tree and as HTML.

A page is a list of lines, and a line is a list of elements. Interactive elements are numbered from 1 in their order;
the elements with a value are the fields of the one form of a page, which its buttons submit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib.resources import files
from string import Template
from typing import Literal, NamedTuple

Role = Literal["text", "link", "textbox", "select", "checkbox", "button"]
FIELDS: tuple[Role, ...] = ("textbox", "select", "checkbox")
"""Roles of elements with a value."""
MAX_TEXT = 100
"""Maximum number of characters of a text field."""
BUTTON = "do"
"""Name in a submitted form of the label of the button."""


class Element(NamedTuple):
    """A text or an interactive element. `target` is the path of a link; the value of a checkbox is `yes` or `no`."""

    role: Role
    name: str
    value: str = ""
    options: tuple[str, ...] = ()
    target: str = ""


class Line(NamedTuple):
    """A line of a page; consecutive lines with `in_table` are the rows of a table.

    `color` is a CSS color behind a row, which documents show and trees do not; empty means none.
    """

    elements: Sequence[Element]
    in_table: bool = False
    color: str = ""


@dataclass(frozen=True)
class SitePage:
    """A page with its title. Its elements have their values before any input, unlike the `items` of a rendering."""

    title: str
    lines: Sequence[Line]

    @cached_property
    def items(self) -> Sequence[Element]:
        """The interactive elements."""
        return [one for line in self.lines for one in line.elements if one.role != "text"]


def form_of(items: Sequence[Element], button: str) -> dict[str, str]:
    """Return the form that a button submits, as a browser does: without the checkboxes that are not checked."""
    fields = (one for one in items if one.role in FIELDS and (one.role, one.value) != ("checkbox", "no"))
    return {**{one.name: one.value for one in fields}, BUTTON: button}


def clean(text: str) -> str:
    """Return at most `MAX_TEXT` printable characters of a text, with single spaces."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:MAX_TEXT].rstrip()


def as_tree(page: SitePage, items: Sequence[Element]) -> str:
    """Return the accessibility tree, one text line for each line of the page.

    Brackets and quotes in texts are replaced, so that no content of a record looks like an element.
    """
    lines, number = [f"# {_plain(page.title)}"], 0
    for line in page.lines:
        shown = []
        for one in line.elements:
            if one.role == "text":
                shown.append(_plain(one.name))
            else:
                shown.append(as_item(items[number], number + 1))
                number += 1
        lines.append(" ".join(shown))
    return "\n".join(lines)


def as_item(item: Element, number: int) -> str:
    """Return the text of an interactive element, such as `[3] textbox "Subject" value ""`."""
    text = f'[{number}] {item.role} "{_quoted(item.name)}"'
    if item.role == "textbox":
        return f'{text} value "{_quoted(item.value)}"'
    if item.role == "select":
        return f'{text} value "{_quoted(item.value)}" of {", ".join(map(_quoted, item.options))}'
    return f"{text} {item.value}" if item.role == "checkbox" else text


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def _quoted(text: str) -> str:
    return _plain(text).replace('"', "'")


def as_html(page: SitePage, items: Sequence[Element]) -> str:
    """Return the body of an HTML document, in which the `id` of an interactive element is its number."""
    lines, number, in_table = [f"<h1>{escape(page.title)}</h1>"], 0, False
    for line in page.lines:
        shown = []
        for one in line.elements:
            if one.role == "text":
                shown.append(f"<span>{escape(one.name)}</span>")
            else:
                shown.append(_tag(items[number], number + 1))
                number += 1
        if line.in_table != in_table:
            lines.append("<table>" if line.in_table else "</table>")
            in_table = line.in_table
        cells = [f"<td>{one}</td>" for one in shown] if in_table else shown
        row = f'<tr style="background: {line.color}">' if line.color else "<tr>"
        lines.append(f"{row}{''.join(cells)}</tr>" if in_table else f"<p>{' '.join(cells)}</p>")
    return "\n".join(lines + ["</table>"] * in_table)


def as_document(page: SitePage) -> str:
    """Return a complete HTML document."""
    return Template(_file("document.html")).substitute(title=escape(page.title), body=as_html(page, page.items))


def reader_script() -> str:
    """Return the JavaScript function that reads the accessibility tree and the values from a document."""
    return _file("reader.js")


@cache
def _file(name: str) -> str:
    return (files(__package__) / "data" / name).read_text("utf-8")


def _tag(item: Element, number: int) -> str:
    name, text = escape(item.name), escape(item.value)
    if item.role == "link":
        return f'<a id="{number}" href="{escape(item.target)}">{name}</a>'
    if item.role == "button":
        return f'<button id="{number}" name="{BUTTON}" value="{name}">{name}</button>'
    attributes = f'id="{number}" name="{name}"'
    if item.role == "checkbox":
        checked = " checked" * (item.value == "yes")
        field = f'<input type="checkbox" {attributes} value="yes"{checked}>'
    elif item.role == "textbox":
        field = f'<input {attributes} maxlength="{MAX_TEXT}" value="{text}">'
    else:
        options = (f"<option{' selected' * (one == item.value)}>{escape(one)}</option>" for one in item.options)
        field = f"<select {attributes}>{''.join(options)}</select>"
    return f"<label>{name} {field}</label>"
