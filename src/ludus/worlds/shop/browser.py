"""Visits to the shop in Chromium: pages served on this machine, read and clicked through Playwright.

One process has one server, one browser, and one event loop in a thread for both; each visit has a browser context.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import parse_qs

from ludus.errors import UserError, WorldError
from ludus.worlds.shop.pages import as_document
from ludus.worlds.shop.session import PageVisit, ShopAction, ShopSession

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Playwright

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Timeout of an operation in the browser."""
_BUTTONS = "button[name=click]"
MAX_BODY = 10_000
"""Largest form in bytes."""


class ShopServer(ThreadingHTTPServer):
    """HTTP server of visits, at `/NUMBER` each: GET shows the current page, POST applies an action."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sessions: dict[str, ShopSession] = {}
        self._numbers = itertools.count(1)
        threading.Thread(target=self.serve_forever, name="shop-server", daemon=True).start()

    def add(self, session: ShopSession) -> str:
        """Return the path of a new visit."""
        path = f"/{next(self._numbers)}"
        self.sessions[path] = session
        return path


class _Handler(BaseHTTPRequestHandler):
    server: ShopServer

    def do_GET(self) -> None:
        session = self.server.sessions.get(self.path)
        if session is None:
            return self.send_error(404)
        body = as_document(session.page).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)
        return None

    def do_POST(self) -> None:
        session, size = self.server.sessions.get(self.path), int(self.headers.get("Content-Length", 0))
        if session is None or size > MAX_BODY:
            return self.send_error(404)
        form = parse_qs(self.rfile.read(size).decode(), keep_blank_values=True)
        is_search = "query" in form
        session.act(ShopAction(is_search, form.get("query" if is_search else "click", [""])[0]))
        self.send_response(303)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    server: ShopServer
    playwright: Playwright
    browser: Browser


class ShopBrowser:
    """Server and browser, started at the first visit. Safe to use from several threads.

    `executable` is the path of a Chromium; empty means `chromium` on the path, or else the browser of Playwright.
    """

    def __init__(self, executable: str = "") -> None:
        self._executable = executable or shutil.which("chromium")
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def open(self, session: ShopSession) -> BrowserVisit:
        """Return a visit at its first page. Raises UserError without Playwright or Chromium."""
        with self._lock:
            running = self._running = self._running or self._start()
        path = running.server.add(session)
        url = f"http://127.0.0.1:{running.server.server_address[1]}{path}"
        return BrowserVisit(running, path, _run(running.loop, _open_page(running.browser, url)))

    def close(self) -> None:
        """Stop browser and server, if they run."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.server.shutdown()
            running.server.server_close()
            _run(running.loop, running.browser.close())
            _run(running.loop, running.playwright.stop())
            running.loop.call_soon_threadsafe(running.loop.stop)

    def _start(self) -> _Running:
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError as error:
            raise UserError(
                "env.settings.observation = 'browser' needs the package playwright.",
                "Install it: pip install 'ludus[browser]'.",
            ) from error
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="shop-browser", daemon=True).start()
        playwright = _run(loop, async_playwright().start())
        launch = playwright.chromium.launch(executable_path=self._executable, args=["--no-sandbox"], headless=True)
        try:
            browser = asyncio.run_coroutine_threadsafe(launch, loop).result()
        except Error as error:
            _run(loop, playwright.stop())
            loop.call_soon_threadsafe(loop.stop)
            raise UserError(
                f"Chromium does not start: {error.message.splitlines()[0]}",
                "Install it (`playwright install chromium`), or set env.settings.chromium to its path.",
            ) from error
        return _Running(loop, ShopServer(), playwright, browser)


class BrowserVisit(PageVisit):
    """A visit in its own browser context. Observations are read from the document, and clicks are clicks of a mouse."""

    def __init__(self, running: _Running, path: str, page: Page) -> None:
        self.page = page
        self._running, self._path = running, path

    def read(self) -> str:
        """Return the visible text of the document, without empty lines."""
        text = _run(self._running.loop, self.page.inner_text("body"))
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

    def clickable(self) -> list[str]:
        return _run(self._running.loop, self.page.locator(_BUTTONS).all_inner_texts())

    def act(self, action: ShopAction) -> bool:
        return _run(self._running.loop, _act(self.page, action))

    def close(self) -> None:
        """Close the context."""
        self._running.server.sessions.pop(self._path, None)
        _run(self._running.loop, self.page.context.close())


async def _open_page(browser: Browser, url: str) -> Page:
    page = await (await browser.new_context(viewport={"width": 800, "height": 700})).new_page()
    page.set_default_timeout(TIMEOUT_S * 1000)
    await page.goto(url)
    return page


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


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on the loop of the browser. Raises WorldError if the browser fails or times out."""
    from playwright.async_api import Error

    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(TIMEOUT_S)
    except (Error, TimeoutError) as error:
        future.cancel()
        cause = str(error) or f"no reply within {TIMEOUT_S:g} s"
        hint = "Reduce env.settings.browser_episodes, or check Chromium."
        raise WorldError(f"The browser failed: {cause}", hint) from error
