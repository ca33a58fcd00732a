"""Web sites of episodes in Chromium: served on this machine, read and operated through Playwright.

A process has one server, one browser, and one event loop in a thread for both. Each episode has its own host name and
browser context, which can reach only its site. `BrowserWorld` is the base of worlds whose pages may be read so.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

from pydantic import Field

from ludus.envs.settings import WorldSettings
from ludus.envs.simulator_world import SimulatorWorld
from ludus.errors import UserError, WorldError

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Playwright, Route

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Timeout of an operation in the browser."""
IDLE_S = 60.0
"""Seconds after which the server closes a connection without requests."""
MAX_BODY = 10_000
"""Largest form in bytes."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; base-uri 'none'"
"""Content security policy of all documents: no scripts, no requests except navigation."""
ARGUMENTS = ("--no-sandbox", "--host-resolver-rules=MAP *.localhost 127.0.0.1, MAP * ~NOTFOUND")
"""Arguments of Chromium. Names other than those of sites do not resolve."""


class WebSite(Protocol):
    """The site of one episode. A path may have a query."""

    def document(self, path: str) -> str | None:
        """Return an HTML document; None if there is none."""

    def submit(self, path: str, form: Mapping[str, str]) -> str | None:
        """Apply a form; return the path to go to, or None if the path has no form."""


class _Server(ThreadingHTTPServer):
    """HTTP server of sites by host name: GET returns a document, POST applies a form and redirects."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sites: dict[str, WebSite] = {}
        threading.Thread(target=self.serve_forever, name="site-server", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        site = self.server.sites.get(self.headers.get("Host", ""))
        document = site.document(self.path) if site is not None else None
        if document is None:
            return self.send_error(404)
        return self._send(200, document.encode(), "Content-Type", "text/html; charset=utf-8")

    def do_POST(self) -> None:
        site, size = self.server.sites.get(self.headers.get("Host", "")), self.headers.get("Content-Length", "")
        if site is None or not size.isdecimal() or int(size) > MAX_BODY:
            return self.send_error(404)
        text = self.rfile.read(int(size)).decode(errors="replace")
        target = site.submit(self.path, dict(parse_qsl(text, keep_blank_values=True)))
        return self.send_error(404) if target is None else self._send(303, b"", "Location", target)

    def _send(self, status: int, body: bytes, header: str, value: str) -> None:
        self.send_response(status)
        self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class BrowserSettings(WorldSettings):
    """Settings common to worlds with pages (`env.settings`)."""

    num_tasks: int = Field(1000, ge=10, le=20_000)
    """Number of tasks of all splits together."""
    chromium: str = ""
    """Path of a Chromium; empty means `chromium` on the path, or else the browser of Playwright."""
    browser_episodes: int = Field(8, ge=1)
    """Maximum number of episodes at once in the browser."""
    seed: int = 0


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    server: _Server
    playwright: Playwright
    browser: Browser


class SiteBrowser:
    """Server and browser, started at the first site. Safe to use from several threads.

    `executable` is the path of a Chromium; empty means `chromium` on the path, or else the browser of Playwright.
    """

    def __init__(self, executable: str = "") -> None:
        self._executable = executable or shutil.which("chromium")
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def open(self, site: WebSite, path: str = "/", size: tuple[int, int] = (800, 700)) -> BrowserTab:
        """Return a tab at a path of a site; `size` is width and height in pixels.

        Raises UserError without Playwright or Chromium.
        """
        with self._lock:
            running = self._running = self._running or self._start()
        host = f"{secrets.token_hex(8)}.localhost:{running.server.server_address[1]}"
        running.server.sites[host] = site
        try:
            return BrowserTab(
                running, host, _run(running.loop, _open_page(running.browser, f"http://{host}", size)), path
            )
        except WorldError:
            running.server.sites.pop(host)
            raise

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
                "An observation in a browser needs the package playwright.", "Install it: pip install 'ludus[browser]'."
            ) from error
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="site-browser", daemon=True).start()
        playwright = _run(loop, async_playwright().start())
        launch = playwright.chromium.launch(executable_path=self._executable, args=list(ARGUMENTS), headless=True)
        try:
            browser = asyncio.run_coroutine_threadsafe(launch, loop).result()
        except Error as error:
            _run(loop, playwright.stop())
            loop.call_soon_threadsafe(loop.stop)
            raise UserError(
                f"Chromium does not start: {error.message.splitlines()[0]}",
                "Install it (`playwright install chromium`), or set env.settings.chromium to its path.",
            ) from error
        return _Running(loop, _Server(), playwright, browser)


class BrowserTab:
    """A page of Chromium in its own browser context."""

    def __init__(self, running: _Running, host: str, page: Page, path: str) -> None:
        self.page = page
        self._running, self._host = running, host
        self.open(path)

    @property
    def path(self) -> str:
        """The path of the current document, with its query."""
        url: str = self.page.url
        return url.removeprefix(f"http://{self._host}")

    def open(self, path: str) -> None:
        """Go to a path of the site."""
        self.run(self.page.goto(f"http://{self._host}{path}", wait_until="domcontentloaded"))

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop of the browser. Raises WorldError if the browser fails or times out."""
        return _run(self._running.loop, work)

    def screenshot(self) -> bytes:
        """Return a PNG of the visible part of the page."""
        png: bytes = self.run(self.page.screenshot())
        return png

    def close(self) -> None:
        """Close the context and forget the site."""
        self._running.server.sites.pop(self._host, None)
        self.run(self.page.context.close())


@dataclass(frozen=True)
class BrowserWorld(SimulatorWorld):
    """Tasks on pages. `browser` is used if `blocks`, at most `browser_episodes` episodes at once."""

    browser: SiteBrowser = field(default_factory=SiteBrowser)
    browser_episodes: int = 1

    @property
    def episodes_at_once(self) -> int | None:
        """The maximum number of episodes in the browser; None without a browser."""
        return self.browser_episodes if self.blocks else None

    async def close(self) -> None:
        """Close the browser."""
        await asyncio.to_thread(self.browser.close)


async def _open_page(browser: Browser, origin: str, size: tuple[int, int]) -> Page:
    async def pass_own(route: Route) -> None:
        is_own = route.request.url.startswith(f"{origin}/")
        await (route.continue_() if is_own else route.abort())

    viewport = {"width": size[0], "height": size[1]}
    context = await browser.new_context(viewport=viewport, service_workers="block", accept_downloads=False)
    await context.route("**/*", pass_own)
    context.set_default_timeout(TIMEOUT_S * 1000)
    return await context.new_page()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, T]) -> T:
    from playwright.async_api import Error

    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(TIMEOUT_S)
    except (Error, TimeoutError) as error:
        future.cancel()
        cause = str(error) or f"no reply within {TIMEOUT_S:g} s"
        hint = "Reduce env.settings.browser_episodes, or check Chromium."
        raise WorldError(f"The browser failed: {cause}", hint) from error
