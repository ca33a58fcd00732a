"""Pages of the shop, and their renderings as text, simplified HTML, and a document for a browser.

A page is a list of lines, and a line is a list of spans. The three renderings of a page have the same visible text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal, NamedTuple

from ludus.worlds.shop.catalogue import Product

NEXT, PREVIOUS, BACK = "Next >", "< Prev", "Back to Search"
BUY, DESCRIPTION, FEATURES = "Buy Now", "Description", "Features"


class Span(NamedTuple):
    """A piece of a line: text, a button that can be clicked, the search field, or its submit button."""

    text: str
    role: Literal["text", "click", "field", "submit"] = "text"


class Page(NamedTuple):
    """The lines of a page."""

    lines: Sequence[Sequence[Span]]

    @property
    def clickable(self) -> list[str]:
        """The labels that can be clicked."""
        return [span.text for line in self.lines for span in line if span.role == "click"]

    @property
    def has_search(self) -> bool:
        return any(span.role == "field" for line in self.lines for span in line)


def search_page(instruction: str) -> Page:
    """Return the page with the instruction and the search field."""
    return Page(((Span(instruction),), (Span("", "field"), Span("Search", "submit"))))


def results_page(products: Sequence[tuple[str, Product]], number: int, num_pages: int) -> Page:
    """Return a page of results. `number` counts from 0. Ids are at the end of a row, so that a causal model has read
    the product before its id."""
    rows = [(Span(f"{one.title} ${one.price} "), Span(label, "click")) for label, one in products]
    buttons = [NEXT] * (number + 1 < num_pages) + [PREVIOUS] * (number > 0) + [BACK]
    heading = f"page {number + 1} of {num_pages}" if num_pages else "no results"
    return Page(((Span(heading),), *rows, _separated(buttons, " | ")))


def item_page(product: Product, chosen: Mapping[str, str]) -> Page:
    """Return the page of a product with the chosen options."""
    lines: list[tuple[Span, ...]] = [(Span(product.title),), (Span(f"${product.price}"),)]
    for name, values in product.options.items():
        label = f"{name} ({chosen[name]}): " if name in chosen else f"{name}: "
        lines.append((Span(label), *_separated(values, ", ")))
    return Page((*lines, _separated((DESCRIPTION, FEATURES, PREVIOUS, BACK, BUY), " | ")))


def detail_page(text: str) -> Page:
    """Return a page with the description or the features of a product."""
    return Page(((Span(text),), _separated((PREVIOUS, BACK), " | ")))


def done_page(product: Product) -> Page:
    """Return the page after a purchase."""
    return Page(((Span("Thank you for your order."),), (Span(product.title),)))


def _separated(labels: Sequence[str], separator: str) -> tuple[Span, ...]:
    spans = [span for label in labels for span in (Span(separator), Span(label, "click"))]
    return tuple(spans[1:])


def as_text(page: Page) -> str:
    """Return the visible text, one line for each line of the page."""
    return "\n".join("".join(span.text for span in line) for line in page.lines)


def as_html(page: Page) -> str:
    """Return simplified HTML: the first line is the heading."""
    return _html(page, values=False)


def as_document(page: Page) -> str:
    """Return a complete HTML document, whose buttons send a form."""
    return _template().replace("$body", _html(page, values=True))


@cache
def _template() -> str:
    return (files(__package__) / "data/document.html").read_text("utf-8")


def _html(page: Page, *, values: bool) -> str:
    lines = []
    for number, line in enumerate(page.lines):
        tag = "p" if number else "h1"
        lines.append(f"<{tag}>{''.join(_element(span, values) for span in line)}</{tag}>")
    return "\n".join(lines)


def _element(span: Span, values: bool) -> str:
    text = escape(span.text)
    if span.role == "text":
        return text
    if span.role == "field":
        return '<input name="query">'
    value = f' name="click" value="{text}"' if values and span.role == "click" else ""
    return f"<button{value}>{text}</button>"
