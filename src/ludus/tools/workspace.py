"""`Workspace`: the sandbox session of one episode, which several tools share.

An environment makes one for each episode, opens it in `start` and ends it in `close`
(`ludus.envs.tool_env.ToolEnv` does both). Calls wait for one another. A call is never torn: where its
deadline fires, it goes on unheard until the limits of the sandbox end it, and the next call waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ludus.errors import LudusError, UserError, WorldError
from ludus.sandbox.base import (
    MIB,
    FileChange,
    Limits,
    Outcome,
    Process,
    Sandbox,
    SandboxSession,
    SessionKind,
    Snapshot,
)
from ludus.tools.base import ToolError

WAIT_S: Final = 50.0
"""What a tool's deadline adds to the sandbox's own: calls of one episode wait for one another."""
LIMITS: Final = Limits(files_out=2000, files_out_bytes=16 * MIB)
"""Of a workspace: all its files come out at once, for tools that read and edit them."""

T = TypeVar("T")


@dataclass(eq=False)
class Workspace:
    """A session with its folder. `files` are what lies there at first.

    `run` raises ToolError, for the model to read, where the session is lost; the next call finds a new one.
    """

    sandbox: Sandbox
    kind: SessionKind = "python"
    files: Mapping[str, bytes] = field(default_factory=dict)
    limits: Limits = LIMITS
    _session: SandboxSession | None = field(default=None, init=False, repr=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)
    _tasks: set[asyncio.Task[object]] = field(default_factory=set, init=False, repr=False)
    _closed: bool = field(default=False, init=False)

    @property
    def timeout_s(self) -> float:
        """The deadline of a tool that works here."""
        return self.limits.wall_s + WAIT_S

    async def open(self) -> None:
        """Open the session, so that a sandbox that cannot run is found out before the episode begins.

        Raises UserError and WorldError.
        """
        await self._opened()

    async def run(self, code: str) -> Outcome:
        """Run code in the session. Raises ToolError."""
        return await self._untorn(lambda session: session.run(code))

    async def snapshot(self) -> Snapshot:
        """All files of the folder. Raises ToolError."""
        return await self._untorn(lambda session: session.snapshot())

    async def processes(self) -> tuple[Process, ...]:
        """What runs in the session. Raises ToolError."""
        return await self._untorn(lambda session: session.processes())

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Put files into the folder; the others stay. Raises ToolError."""
        await self._untorn(lambda session: session.write(files))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace all files of the folder. Raises ToolError."""
        await self._untorn(lambda session: session.restore(snapshot))

    async def change(self, edit: Callable[[Snapshot], Snapshot]) -> None:
        """Take the files, edit them and put back what differs, with no other call in between.

        Nothing else in the folder is touched: links, empty folders, and the folder that a shell is in, stay.
        Raises ToolError, and whatever `edit` raises; nothing has changed then.
        """

        async def act(session: SandboxSession) -> None:
            before = await session.snapshot()
            after = edit(before)
            await session.change(difference(before, after))

        await self._untorn(act)

    async def close(self) -> None:
        """End the session and whatever runs in it. Closing twice does no harm."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _untorn(self, act: Callable[[SandboxSession], Awaitable[T]]) -> T:
        task = asyncio.get_running_loop().create_task(self._act(act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _act(self, act: Callable[[SandboxSession], Awaitable[T]]) -> T:
        async with self._lock:
            try:
                return await act(await self._opened())
            except UserError as error:
                raise ToolError(error.message) from error
            except WorldError as error:
                raise ToolError(await self._after(error)) from error

    async def _opened(self) -> SandboxSession:
        if self._closed:
            raise WorldError("The workspace is closed.", "Make one for each episode.")
        if self._session is None:
            self._session = await self.sandbox.session(self.kind, files=self.files, limits=self.limits)
        return self._session

    async def _after(self, error: WorldError) -> str:
        """What to say of an error of the session; one that no longer answers is given up."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await session.write({})
            except LudusError:
                await session.close()
            else:
                self._session = session
        if self._session is not None:
            return error.message
        return f"{error.message} The session is lost; the next call finds a new one with the first files."


def difference(before: Snapshot, after: Snapshot) -> FileChange:
    """What makes the files of one snapshot those of another."""
    write = {path: text for path, text in after.files.items() if before.files.get(path) != text}
    marked = (before.executable ^ after.executable) & after.files.keys()
    executable = {path: path in after.executable for path in sorted(marked)}
    return FileChange(write, executable, frozenset(before.files.keys() - after.files.keys()))


def report(outcome: Outcome, limits: Limits, in_session: bool) -> str:
    """What a run printed and how it ended, for a model to read."""
    parts = [outcome.text.rstrip("\n")]
    if error := outcome.error_text.rstrip("\n"):
        parts.append(f"[stderr]\n{error}" if parts[0] else error)
    lost = "; variables are lost, files stay" if in_session else ""
    if outcome.timed_out:
        parts.append(f"[stopped: it took longer than {limits.wall_s:g} s{lost}]")
    elif outcome.memory_exceeded:
        parts.append(f"[stopped: it needs more than {limits.memory_bytes // MIB} MiB of memory{lost}]")
    elif outcome.signal is not None:
        parts.append(f"[ended by signal {outcome.signal}{lost}]")
    elif outcome.exit:
        parts.append(f"[exit code {outcome.exit}]")
    if outcome.left_out_bytes:
        parts.append(f"[{outcome.left_out_bytes} bytes in the middle of the output are not kept]")
    return "\n".join(part for part in parts if part) or "[no output]"
