"""Connections to environment servers: at a URL, or in a process of this one, which is started again if it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import IO, Final, TypeVar

import httpx
from pydantic import BaseModel

from ludus.errors import WorldError
from ludus.untrusted.json_client import JsonClient, ServiceUnreachable, get_bounded

T = TypeVar("T", bound=BaseModel)

HEALTH_S: Final = 5.0
"""Timeout of a health check after a request that timed out (s)."""
_RETRY_DELAYS_S: Final = (0.1, 0.4, 1.6)
_DOWN_S: Final = 10.0
"""Time for which a server that was unreachable is chosen last (s)."""
_STOP_S: Final = 10.0
_READY: Final = re.compile(r" at (http://\S+)$")
"""End of the line that a server prints once it listens."""


class Server:
    """A server at a URL. `load` counts the open episodes of this process."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.load = 0
        self.last_failure = -_DOWN_S

    @property
    def can_retry(self) -> bool:
        """Whether a request that did not reach the server may be repeated."""
        return True

    @property
    def is_down(self) -> bool:
        """Whether the server was unreachable a moment ago."""
        return time.monotonic() - self.last_failure < _DOWN_S

    async def address(self) -> str:
        """Return the URL."""
        return self.url

    async def check(self) -> None:
        """Act on a request that timed out."""

    def stop(self) -> None:
        """Release the resources of this process."""


class ServerProcess(Server):
    """A server in a child process, started by the first request, and again by a request after its end."""

    def __init__(self, command: Sequence[str], start_timeout_s: float) -> None:
        super().__init__("")
        self.starts = 0
        self._command, self._start_timeout_s = command, start_timeout_s
        self._children: list[subprocess.Popen[str]] = []
        self._lock = Lock()
        self._stop = weakref.finalize(self, _stop_all, self._children)

    @property
    def can_retry(self) -> bool:
        return self._is_running

    @property
    def is_down(self) -> bool:
        return False

    @property
    def _is_running(self) -> bool:
        return bool(self._children) and self._children[-1].poll() is None

    async def address(self) -> str:
        if not self._is_running:
            await asyncio.to_thread(self._start)
        return self.url

    async def check(self) -> None:
        """Kill the process if it does not respond, so that the next episode starts another."""
        try:
            await asyncio.to_thread(get_bounded, f"{self.url}/health", HEALTH_S)
        except Exception:  # boundary: the server is replaced for any failure
            self.stop()

    def stop(self) -> None:
        _stop_all(self._children)

    def _start(self) -> None:
        """Start the process and wait for its URL. Raises WorldError with the end of its output."""
        with self._lock:
            if self._is_running:
                return
            _stop_all(self._children)
            self.starts += 1
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
                try:
                    self.url = self._launch(errors)
                except OSError as error:
                    raise WorldError(f"The environment server {self._command[0]} did not start: {error}.") from error

    def _launch(self, errors: IO[str]) -> str:
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,  # its end tells the server that this process has ended
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        self._children.append(child)
        lines: list[str] = []
        reader = Thread(target=_read_lines, args=(child, lines), daemon=True)
        reader.start()
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline and (reader.is_alive() or lines):
            if found := _READY.search(lines.pop(0).strip() if lines else ""):
                return found[1]
            time.sleep(0.0 if lines else 0.02)
        _stop_all(self._children)
        errors.seek(0)
        text = f"The environment server `{' '.join(self._command)}` did not start within {self._start_timeout_s:g} s."
        raise WorldError(f"{text} Its output: {errors.read().strip()[-1000:]}", "Run it manually.")


def _read_lines(child: subprocess.Popen[str], lines: list[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if len(lines) < 1000:
            lines.append(line)


def _stop_all(children: list[subprocess.Popen[str]]) -> None:
    """Terminate processes and their groups; kill those that do not exit in time."""
    while children:
        child = children.pop()
        for number, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


@dataclass(eq=False)
class Pool:
    """Servers of the same world. Requests are repeated after a lost connection, never after a timeout."""

    servers: Sequence[Server]
    client: JsonClient
    timeout_s: float
    _turn: int = field(default=0, init=False)

    def choose(self) -> Server:
        """Return the reachable server with the fewest open episodes, in turn if several have as few."""
        self._turn += 1
        num = len(self.servers)
        order = [self.servers[(self._turn + i) % num] for i in range(num)]
        return min(order, key=lambda one: (one.is_down, one.load))

    async def post(self, server: Server, path: str, message: BaseModel, reply: type[T]) -> T:
        """POST a message and parse the response. Raises UserError if refused, WorldError on failures."""
        url = await server.address()
        for delay_s in (*_RETRY_DELAYS_S, 0.0):
            try:
                return await self.client.post(f"{url}{path}", message, reply, self.timeout_s)
            except ServiceUnreachable as error:
                was_down = server.is_down
                if isinstance(error.__cause__, httpx.ConnectError):
                    server.last_failure = time.monotonic()
                if not delay_s or not server.can_retry or was_down:
                    raise
            except WorldError as error:
                if isinstance(error.__cause__, TimeoutError):
                    await server.check()
                raise
            await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def stop(self) -> None:
        """Stop the servers that are processes of this one."""
        for server in self.servers:
            server.stop()
