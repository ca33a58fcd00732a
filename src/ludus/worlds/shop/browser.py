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
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs

from ludus.errors import UserError, WorldError
from ludus.worlds.shop.pages import as_document
from ludus.worlds.shop.session import ShopAction, ShopSession

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Playwright

T = TypeVar("T")

TIMEOUT_S = 30.0
"""Timeout of an operation in the browser."""
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

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


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


class ShopBrowser:
    """Server and browser, started at the first visit. Safe to use from several threads.

    `executable` is the path of a Chromium; empty means `chromium` on the path, or else the browser of Playwright.
    """

    def __init__(self, executable: str = "") -> None:
        self._executable = executable or shutil.which("chromium")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: ShopServer | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    def open(self, session: ShopSession) -> BrowserVisit:
        """Return a visit at its first page. Raises UserError without Playwright or Chromium."""
        with self._lock:
            if self._loop is None or self._server is None:
                self._start()
        assert self._server is not None
        path = self._server.add(session)
        context, page = self.run(self._open(self._server.url(path)))
        return BrowserVisit(self, path, context, page)

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop of the browser. Raises WorldError if the browser fails or times out."""
        from playwright.async_api import Error

        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(TIMEOUT_S)
        except (Error, TimeoutError) as error:
            future.cancel()
            raise WorldError(
                f"The browser failed: {error}", "Reduce rollout.concurrency, or check Chromium."
            ) from error

    def release(self, path: str) -> None:
        """Forget a visit."""
        if self._server is not None:
            self._server.sessions.pop(path, None)

    def close(self) -> None:
        """Stop browser and server."""
        with self._lock:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()
            if self._loop is not None:
                self.run(self._stop())
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = self._server = self._playwright = self._browser = None

    def _start(self) -> None:
        try:
            from playwright.async_api import Error
        except ImportError as error:
            raise UserError(
                "env.settings.observation = 'browser' needs the package playwright.",
                "Install it: pip install 'ludus[browser]'.",
            ) from error
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="shop-browser", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._launch(), loop).result(TIMEOUT_S)
        except Error as error:
            loop.call_soon_threadsafe(loop.stop)
            raise UserError(
                f"Chromium does not start: {error.message.splitlines()[0]}",
                "Install it (`playwright install chromium`), or set env.settings.chromium to its path.",
            ) from error
        self._loop, self._server = loop, ShopServer()

    async def _launch(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._executable, args=["--no-sandbox"], headless=True
        )

    async def _open(self, url: str) -> tuple[BrowserContext, Page]:
        assert self._browser is not None
        context = await self._browser.new_context(viewport={"width": 800, "height": 700})
        page = await context.new_page()
        await page.goto(url)
        return context, page

    async def _stop(self) -> None:
        if self._browser is not None:
            await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()


class BrowserVisit:
    """A visit in its own browser context. Observations are read from the document, and clicks are clicks of a mouse."""

    def __init__(self, browser: ShopBrowser, path: str, context: BrowserContext, page: Page) -> None:
        self.page = page
        self._browser, self._path, self._context = browser, path, context

    def read(self) -> str:
        """Return the visible text of the document, without empty lines."""
        text = self._browser.run(self.page.inner_text("body"))
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

    def clickable(self) -> list[str]:
        """Return the labels of the buttons in the document."""
        return self._browser.run(self.page.locator("button[name=click]").all_inner_texts())

    def act(self, action: ShopAction) -> bool:
        """Fill in the search field, or click a button; return false if the document does not have it."""
        return self._browser.run(self._act(action))

    def close(self) -> None:
        """Close the context."""
        self._browser.release(self._path)
        self._browser.run(self._context.close())

    async def _act(self, action: ShopAction) -> bool:
        if action.is_search:
            if not await self.page.locator("input[name=query]").count():
                return False
            await self.page.locator("input[name=query]").fill(action.argument)
            target = self.page.get_by_role("button", name="Search", exact=True)
        else:
            buttons = self.page.locator("button[name=click]")
            labels = await buttons.all_inner_texts()
            label = action.find(labels)
            if label is None:
                return False
            target = buttons.nth(labels.index(label))
        async with self.page.expect_navigation():
            await target.click()
        return True
