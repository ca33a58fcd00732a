"""`fetch`: read pages of a local corpus by URL. The network is not used."""

from __future__ import annotations

import difflib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urldefrag

from ludus.errors import UserError
from ludus.tools.base import Tool, ToolError, Traits, tool

PAGE: Final = 1500  # characters per page; a page and its header fit into `rollout.max_tool_output`
NEAR: Final = 3
_TEXTS: Final = (".html", ".htm", ".md", ".txt")


def fetch_tool(corpus: Mapping[str, str], page_size: int = PAGE) -> Tool:
    """Create the tool `fetch(url, page)` over a corpus by URL. Raises UserError for equivalent URLs."""
    by_key = {_key(url): url for url in corpus}
    if len(by_key) < len(corpus):
        duplicate = next(url for url in corpus if by_key[_key(url)] != url)
        raise UserError(f"Two URLs of the corpus are equivalent: {duplicate} and {by_key[_key(duplicate)]}.")

    async def fetch(url: str, page: int = 1) -> str:
        """Read a web page. A long one has several pages.

        Args:
            url: its address.
            page: which of its pages, from 1.
        """
        found = by_key.get(_key(url))
        if found is None:
            raise ToolError(f"there is no page {url!r}. {_suggestion(url, by_key)}")
        pages = split_pages(corpus[found], page_size)
        if not 1 <= page <= len(pages):
            raise ToolError(f"{found} has {len(pages)} pages; there is no page {page}")
        head = f"[{found}, page {page} of {len(pages)}]\n" if len(pages) > 1 else ""
        return head + pages[page - 1]

    return tool(traits=Traits(latency="instant", idempotent=True))(fetch)


def split_pages(text: str, size: int) -> list[str]:
    """Split a text, without loss, into pages of at most `size` characters, at a line or word in the last third."""
    pages: list[str] = []
    while len(text) > size:
        floor = size * 2 // 3
        cut = text.rfind("\n", floor, size) + 1 or text.rfind(" ", floor, size) + 1 or size
        pages.append(text[:cut])
        text = text[cut:]
    return [*pages, text]


def load_corpus(path: Path) -> dict[str, str]:
    """Load a corpus as texts by URL.

    A JSON-lines file has objects with `url` and `text`. In a folder, each .html, .htm, .md and .txt file is a
    page with its relative path as URL; HTML is converted to text. Raises UserError.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file())
        return {file.relative_to(path).as_posix(): _read(file) for file in files}
    corpus: dict[str, str] = {}
    for number, line in enumerate(json_lines(_read(path)), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            url, text = entry["url"], entry["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            hint = 'Each line is {"url": ..., "text": ...}.'
            raise UserError(f"{path}, line {number} is not a corpus page.", hint) from error
        if not isinstance(url, str) or not isinstance(text, str) or url in corpus:
            raise UserError(f"{path}, line {number}: url and text must be strings, and each url unique.")
        corpus[url] = text
    return corpus


def json_lines(text: str) -> list[str]:
    """Split a JSON-lines file at line feeds, keeping blank lines, without a leading byte order mark.

    JSON text may contain U+2028, U+2029 and U+0085, at which `str.splitlines` would split.
    """
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").split("\n")


def text_of_html(page: str) -> str:
    """Return the visible text of a page, without scripts, styles and tags; each block element becomes a line."""
    page = re.sub(r"(?is)<!--.*?-->|<(script|style|head)\b.*?</\1\s*>", " ", page)
    page = re.sub(r"\s+", " ", page)
    page = re.sub(r"(?i)<(?:br|/?(?:p|div|li|ul|ol|tr|table|h[1-6]|section|article|pre))\b[^>]*>", "\n", page)
    lines = (" ".join(line.split()) for line in html.unescape(re.sub(r"<[^>]*>", "", page)).splitlines())
    return "\n".join(line for line in lines if line)


def _read(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}.", "A corpus must be UTF-8 text.") from error
    return text_of_html(text) if file.suffix in (".html", ".htm") else text


def _key(url: str) -> str:
    """Return the URL in lower case, without scheme, `www.`, fragment and trailing slash."""
    normalized = unquote(urldefrag(url.strip())[0]).casefold()
    return re.sub(r"^(?:https?://)?(?:www\.)?", "", normalized).rstrip("/")


def _suggestion(url: str, by_key: Mapping[str, str]) -> str:
    key = _key(url)
    near = difflib.get_close_matches(key, by_key, n=NEAR, cutoff=0.4)
    last = key.rpartition("/")[2]
    near += [other for other in by_key if last and last in other and other not in near]
    if not near:
        return "Search for the page first."
    return "Near ones: " + ", ".join(by_key[other] for other in near[:NEAR])


def stripped_lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends and without empty lines at the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
