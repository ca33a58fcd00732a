"""`Workspace`: the sandbox session of one episode, shared by several tools, and the tools `python` and `shell`.

An environment creates one per episode, opens it in `start` and closes it in `close` (`ludus.envs.tool_env.ToolEnv` does
both). Calls run one at a time. A call that times out continues to run until it reaches the sandbox's limits; the next
call waits for it. If a program fails, the call still succeeds: traceback and exit code are the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ludus.errors import LudusError, UserError, WorldError
from ludus.sandbox.base import MIB, FileChange, Limits, Outcome, Process, Sandbox, SandboxSession, SessionKind, Snapshot
from ludus.tools.base import Tool, ToolError, ToolFunction, Traits, tool

WAIT_S: Final = 50.0  # margin of a tool's timeout over the sandbox's time limit (s), since calls of an episode queue
LIMITS: Final = Limits(files_out=2000, files_out_bytes=16 * MIB)
"""Limits of a workspace; file tools transfer all files at once."""

T = TypeVar("T")


@dataclass(eq=False)
class Workspace:
    """A session with its folder. `files` are the initial contents.

    `run` raises ToolError with a message for the model if the session is lost; the next call opens a new one.
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
        """Timeout of a tool on this workspace (s)."""
        return self.limits.wall_s + WAIT_S

    async def open(self) -> None:
        """Open the session early, to detect an unavailable sandbox. Raises UserError and WorldError."""
        await self._get_session()

    async def run(self, code: str) -> Outcome:
        """Run code in the session. Raises ToolError."""
        return await self._run_shielded(lambda session: session.run(code))

    async def snapshot(self) -> Snapshot:
        """Return all files of the folder. Raises ToolError."""
        return await self._run_shielded(lambda session: session.snapshot())

    async def processes(self) -> tuple[Process, ...]:
        """Return the session's processes. Raises ToolError."""
        return await self._run_shielded(lambda session: session.processes())

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the folder; other files are unchanged. Raises ToolError."""
        await self._run_shielded(lambda session: session.write(files))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace all files of the folder. Raises ToolError."""
        await self._run_shielded(lambda session: session.restore(snapshot))

    async def change(self, edit: Callable[[Snapshot], Snapshot]) -> None:
        """Edit the files atomically and write back the differences.

        Links, empty folders and a shell's current folder are unaffected. Raises ToolError and any exception
        of `edit`; nothing is changed then.
        """

        async def act(session: SandboxSession) -> None:
            before = await session.snapshot()
            after = edit(before)
            await session.change(difference(before, after))

        await self._run_shielded(act)

    async def close(self) -> None:
        """End the session and its processes. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run_shielded(self, act: Callable[[SandboxSession], Awaitable[T]]) -> T:
        task = asyncio.get_running_loop().create_task(self._run_locked(act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _run_locked(self, act: Callable[[SandboxSession], Awaitable[T]]) -> T:
        async with self._lock:
            try:
                return await act(await self._get_session())
            except UserError as error:
                raise ToolError(error.message) from error
            except WorldError as error:
                raise ToolError(await self._recover(error)) from error

    async def _get_session(self) -> SandboxSession:
        if self._closed:
            raise WorldError("The workspace is closed.", "Create one per episode.")
        if self._session is None:
            self._session = await self.sandbox.session(self.kind, files=self.files, limits=self.limits)
        return self._session

    async def _recover(self, error: WorldError) -> str:
        """Return the message for a session error; close the session if it does not respond."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await session.write({})
                self._session = session
                return error.message
            except LudusError:
                await session.close()
        return f"{error.message} The session is lost; the next call finds a new one with the first files."


def difference(before: Snapshot, after: Snapshot) -> FileChange:
    """Return the changes that turn one snapshot into the other."""
    write = {path: text for path, text in after.files.items() if before.files.get(path) != text}
    marked = (before.executable ^ after.executable) & after.files.keys()
    executable = {path: path in after.executable for path in sorted(marked)}
    return FileChange(write, executable, frozenset(before.files.keys() - after.files.keys()))


def report(outcome: Outcome, limits: Limits, in_session: bool) -> str:
    """Return the output and exit status of a run as text for a model."""
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
    if outcome.omitted_bytes:
        parts.append(f"[{outcome.omitted_bytes} bytes in the middle of the output are not kept]")
    return "\n".join(part for part in parts if part) or "[no output]"


_STATELESS_LIMITS: Final = Limits(files_out=0)


def python_tool(sandbox: Sandbox, limits: Limits = _STATELESS_LIMITS) -> Tool:
    """Create the stateless tool `python(code)`: each call runs in an empty folder."""

    async def python(code: str) -> str:
        """Run a Python program and see what it prints. Nothing is kept from one call to the next.

        Args:
            code: the program; print what you want to see.
        """
        try:
            outcome = await sandbox.run(code, limits=limits)
        except UserError as error:
            raise ToolError(error.message) from error
        text = report(outcome, limits, in_session=False)
        return text if text != "[no output]" else "[no output: print what you want to see]"

    return tool(timeout_s=limits.wall_s + WAIT_S, traits=Traits(idempotent=True))(python)


def python_session_tool(workspace: Workspace) -> Tool:
    """Create `python(code)`, which keeps variables and files. Raises UserError for a workspace that is not Python."""

    async def python(code: str) -> str:
        """Run Python code; see what it prints and the value of its last line. Variables and files are kept.

        Args:
            code: the code to run.
        """
        return report(await workspace.run(code), workspace.limits, in_session=True)

    return _session_tool(workspace, "python", python)


def shell_tool(workspace: Workspace) -> Tool:
    """Create `shell(command)`, which keeps folder, variables and files. Raises UserError for another workspace."""

    async def shell(command: str) -> str:
        """Run commands in a shell and see what they print. The working folder and files are kept.

        Args:
            command: one or more lines for the shell.
        """
        return report(await workspace.run(command), workspace.limits, in_session=True)

    return _session_tool(workspace, "shell", shell)


def _session_tool(workspace: Workspace, kind: SessionKind, run: ToolFunction) -> Tool:
    if workspace.kind != kind:
        hint = f'Create it with Workspace(sandbox, kind="{kind}").'
        raise UserError(f"This tool needs a workspace of kind {kind!r}, but got {workspace.kind!r}.", hint)
    return tool(timeout_s=workspace.timeout_s)(run)
