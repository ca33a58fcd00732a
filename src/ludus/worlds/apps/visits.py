"""Visits of a site: actions on its pages, without a browser (`TreeVisit`) or in one (`TabVisit`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ludus.worlds.apps.pages import Element, SitePage, as_item, clean, form_of, reader_script
from ludus.worlds.apps.site import Site
from ludus.worlds.browser import SiteBrowser

if TYPE_CHECKING:
    from playwright.async_api import Page as BrowserPage

KEYS = ("Enter", "Tab", "Backspace", "Delete", "Escape", "Space", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight")
"""Keys of the action `press`."""
_ITEMS = "a[href], button, input, select"
_NAVIGATES = """([x, y, key]) => {
  const node = key ? document.activeElement : document.elementFromPoint(x, y);
  const leads = node && node.closest(key === "Enter" ? "a, button, input" : "a, button");
  return Boolean(leads) && (!key || key === "Enter" || (key === "Space" && leads.tagName === "BUTTON"));
}"""


class VisitAction(NamedTuple):
    """A parsed action. `number` is that of an element, or the coordinate x."""

    verb: str
    number: int = 0
    text: str = ""
    y: int = 0


def parse_action(text: str, size: tuple[int, int] | None = None) -> VisitAction | None:
    """Return the action in a text, or None; `size`, width and height in pixels, allows the actions of a browser."""
    verb, _, rest = text.strip().partition(" ")
    verb, first, second = verb.lower(), *rest.strip().partition(" ")[::2]
    if size and verb == "write":
        return VisitAction("write", text=clean(rest))
    if size and verb == "press" and rest.strip() in KEYS:
        return VisitAction("press", text=rest.strip())
    if size and (verb, first) == ("click", "at"):
        numbers = [_number(word) for word in second.split()]
        is_point = len(numbers) == 2 and 0 <= numbers[0] < size[0] and 0 <= numbers[1] < size[1]
        return VisitAction("point", numbers[0], y=numbers[1]) if is_point else None
    if verb in ("back", "done"):
        return VisitAction(verb) if not rest else None
    is_known = verb in ("type", "select") or (verb == "click" and not second.strip())
    return VisitAction(verb, _number(first), clean(second)) if is_known and _number(first) > 0 else None


def _number(word: str) -> int:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 5 else -1


class SiteVisit(ABC):
    """What a policy sees of a site, and how it acts on it.

    `items` are the interactive elements of the current page with their values, `history` the paths of earlier pages.
    """

    size: tuple[int, int] | None = None
    """Width and height of the page in pixels; None without a browser."""
    has_tree = True
    """Whether observations contain the page as text."""

    def __init__(self, site: Site) -> None:
        self.site, self.path = site, "/"
        self.history: list[str] = []
        self.items: list[Element] = []

    @abstractmethod
    def read(self) -> str:
        """Return the current page."""

    def screenshot(self) -> bytes | None:
        """Return a PNG of the page; None without a browser."""
        return None

    def close(self) -> None:
        """Release resources."""
        return

    def act(self, action: VisitAction) -> str | None:
        """Apply an action; return the new page, or else the changed element. None if it is not possible."""
        if action.verb == "back":
            if not self.history:
                return None
            self._open(self.history.pop())
            return self.read()
        if action.verb in ("point", "press", "write"):
            return self._follow(action, None)
        item = self.items[action.number - 1] if action.number <= len(self.items) else None
        roles = {"click": ("link", "button", "checkbox"), "type": ("textbox",), "select": ("select",)}
        if item is None or item.role not in roles[action.verb]:
            return None
        if action.verb == "select":
            chosen = next((one for one in item.options if one.casefold() == action.text.casefold()), None)
            if chosen is None:
                return None
            action = action._replace(text=chosen)
        return self._follow(action, item)

    def _follow(self, action: VisitAction, item: Element | None) -> str:
        path = self.path
        self._apply(action, item)
        if self.path != path:
            self.history.append(path)
        if item is None or item.role in ("link", "button") or not self.has_tree:
            return self.read()
        return as_item(self.items[action.number - 1], action.number)

    @abstractmethod
    def _apply(self, action: VisitAction, item: Element | None) -> None:
        """Apply a possible action on an element, and set `path` and `items`."""

    @abstractmethod
    def _open(self, path: str) -> None:
        """Go to a page of the history."""


class TreeVisit(SiteVisit):
    """A visit without a browser. `render` returns the text of a page with the elements `items`."""

    def __init__(self, site: Site, render: Callable[[SitePage, Sequence[Element]], str]) -> None:
        super().__init__(site)
        self._render = render
        self._open("/")

    def read(self) -> str:
        return self._render(self._page, self.items)

    def _open(self, path: str) -> None:
        self.path, self._page = path, self.site.page(path)
        self.items = list(self._page.items)

    def _apply(self, action: VisitAction, item: Element | None) -> None:
        assert item is not None
        if item.role == "link":
            self._open(item.target)
        elif item.role == "button":
            self._open(self.site.submit(self.path, form_of(self.items, item.name)) or self.path)
        else:
            value = ("no" if item.value == "yes" else "yes") if item.role == "checkbox" else action.text
            self.items[action.number - 1] = item._replace(value=value)


class TabVisit(SiteVisit):
    """A visit in a browser tab: pages are read from the document, and actions are those of a mouse and a keyboard.

    Without `has_tree` the observation is the screenshot alone.
    """

    def __init__(self, site: Site, browser: SiteBrowser, size: tuple[int, int], has_tree: bool) -> None:
        super().__init__(site)
        self.size, self.has_tree, self._shown = size, has_tree, f"{size[0]} x {size[1]}"
        self._tab, self._text = browser.open(site, size=size), ""
        self._scan()

    def read(self) -> str:
        return self._text if self.has_tree else f"Screenshot of {self._shown} pixels."

    def screenshot(self) -> bytes:
        """Return a PNG of the page."""
        return self._tab.screenshot()

    def close(self) -> None:
        self._tab.close()

    def _open(self, path: str) -> None:
        self._tab.open(path)
        self._scan()

    def _apply(self, action: VisitAction, item: Element | None) -> None:
        self._tab.run(_operate(self._tab.page, action, item))
        self._scan()

    def _scan(self) -> None:
        found = self._tab.run(self._tab.page.evaluate(reader_script()))
        self.path, self._text = self._tab.path, found["text"]
        self.items = [Element(**{**one, "options": tuple(one["options"])}) for one in found["items"]]


async def _operate(tab: BrowserPage, action: VisitAction, item: Element | None) -> None:
    if item is None:
        await _operate_pixels(tab, action)
        return
    target = tab.locator(_ITEMS).nth(action.number - 1)
    if item.role in ("link", "button"):
        async with tab.expect_navigation(wait_until="domcontentloaded"):
            await target.click(force=True)
    elif item.role == "select":
        await target.select_option(label=action.text)
    else:
        await target.click(force=True)
        if item.role == "textbox":
            await tab.keyboard.press("Control+A")
            await tab.keyboard.press("Delete")
            await tab.keyboard.type(action.text)


async def _operate_pixels(tab: BrowserPage, action: VisitAction) -> None:
    """Click at a point, press a key or write, and wait for the page that this leads to."""

    async def operate() -> None:
        if action.verb == "point":
            await tab.mouse.click(action.number, action.y)
        elif action.verb == "press":
            await tab.keyboard.press(action.text)
        else:
            await tab.keyboard.type(action.text)

    if action.verb != "write" and await tab.evaluate(_NAVIGATES, [action.number, action.y, action.text]):
        async with tab.expect_navigation(wait_until="domcontentloaded"):
            await operate()
    else:
        await operate()
