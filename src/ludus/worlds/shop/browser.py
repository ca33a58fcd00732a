"""Visits to the shop in Chromium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ludus.worlds.browser import BrowserTab, SiteBrowser
from ludus.worlds.shop.pages import as_document
from ludus.worlds.shop.session import PageVisit, ShopAction, ShopSession

if TYPE_CHECKING:
    from playwright.async_api import Page

_BUTTONS = "button[name=click]"


class _ShopSite:
    """The site of a visit: its current page, at any path."""

    def __init__(self, session: ShopSession) -> None:
        self._session = session

    def document(self, path: str) -> str | None:
        return as_document(self._session.page)

    def submit(self, path: str, form: Mapping[str, str]) -> str | None:
        is_search = "query" in form
        self._session.act(ShopAction(is_search, form.get("query" if is_search else "click", "")))
        return "/"


class BrowserVisit(PageVisit):
    """A visit in a browser tab. Observations are read from the document, and clicks are clicks of a mouse."""

    def __init__(self, tab: BrowserTab) -> None:
        self._tab = tab

    def read(self) -> str:
        """Return the visible text of the document, without empty lines."""
        text = self._tab.run(self._tab.page.inner_text("body"))
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

    def clickable(self) -> list[str]:
        return self._tab.run(self._tab.page.locator(_BUTTONS).all_inner_texts())

    def act(self, action: ShopAction) -> bool:
        return self._tab.run(_act(self._tab.page, action))

    def close(self) -> None:
        self._tab.close()


def open_visit(browser: SiteBrowser, session: ShopSession) -> BrowserVisit:
    """Return a visit at its first page. Raises UserError without Playwright or Chromium."""
    return BrowserVisit(browser.open(_ShopSite(session)))


async def _act(page: Page, action: ShopAction) -> bool:
    """Fill in the search field, or click a button; return false if the document does not have it."""
    if action.is_search:
        field = page.locator("input[name=query]")
        if not await field.count():
            return False
        await field.fill(action.argument)
        target = page.get_by_role("button", name="Search", exact=True)
    else:
        labels = await page.locator(_BUTTONS).all_inner_texts()
        label = action.find(labels)
        if label is None:
            return False
        target = page.locator(_BUTTONS).nth(labels.index(label))
    async with page.expect_navigation(wait_until="domcontentloaded"):
        await target.click()
    return True
