"""Requests to a guard: one run, or a session with a persistent interpreter.

One order at a time. A guard that does not respond within a grace period after the order's limits is ended
with its home.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import FileChange, Limits, Outcome, Process, RunOrder, SessionKind, Snapshot, checked_files
from ludus.sandbox.local.cell import (
    GRACE_S,
    GuardGoneError,
    Wire,
    broken_outcome,
    given,
    header_bytes,
    most_bytes,
    outcome_of,
)


class Home(Protocol):
    """Container of guards: a cell, or a series of containers. Has one guard at a time."""

    async def guard(self) -> Wire:
        """Return a new guard, isolated from earlier ones, for one order. Raises WorldError."""
        ...

    def prepare(self) -> None:
        """Start the next guard in advance, if supported."""
        ...

    async def goes_on(self) -> bool:
        """Return whether the home survives a lost guard, in which case the program broke it."""
        ...

    async def end(self) -> None:
        """End everything inside and wait for it. Idempotent."""
        ...


async def run_order(home: Home, order: RunOrder) -> Outcome:
    """Run once from a clean state. Raises WorldError; the home is then unusable.

    A guard that does not respond in time is blamed on the program: it timed out, and the home is ended. So is
    a lost guard in a surviving home: programs can reach their guard, but not its home.
    """
    wire = await home.guard()
    limits, begin = order.limits, time.monotonic()
    try:
        async with asyncio.timeout(limits.wall_s + GRACE_S):
            header = {"op": "run", "argv": list(order.argv), **given(limits, order.files)}
            source = (order.source or "").encode("utf-8", "surrogatepass")
            await wire.send(header, [order.stdin, source, *order.files.values()])
            answer, blobs = await wire.read(most_bytes(limits), header_bytes(limits))
    except TimeoutError:
        await home.end()
        return Outcome(timed_out=True, wall_s=time.monotonic() - begin)
    except GuardGoneError as error:
        if not await home.goes_on():
            raise
        await home.end()
        return broken_outcome(error.message)
    finally:
        wire.close()
    home.prepare()
    return outcome_of(answer, blobs)


class _Unanswered(WorldError):
    """The guard did not respond in time, and its home was ended."""


class _Broken(WorldError):
    """The guard was lost in a surviving home, which was then ended."""


Place = TypeVar("Place", bound=Home)


@dataclass(eq=False)
class GuardSession:
    """A `SandboxSession` on a guard. A failure of the guard ends the session's home."""

    home: Home
    wire: Wire
    kind: SessionKind
    limits: Limits
    _end: Callable[[], Awaitable[None]]
    _closed: bool = False

    @classmethod
    async def start(
        cls,
        home: Place,
        kind: SessionKind,
        files: Mapping[str, bytes],
        limits: Limits,
        end: Callable[[Place], Awaitable[None]],
    ) -> GuardSession:
        """Start a session in `home`, which `end` ends. Raises WorldError."""
        if kind not in ("python", "shell"):
            raise UserError(f"Unknown session kind {kind!r}.", "Kinds: python, shell.")
        session = cls(home, await home.guard(), kind, limits, lambda: end(home))
        await session._open(files)
        return session

    async def run(self, code: str) -> Outcome:
        """Run a call. Raises WorldError if the session is broken or closed.

        A guard that does not respond in time is blamed on the program: the call timed out and the session is
        over. So is a lost guard in a surviving home.
        """
        if self.kind == "shell" and "\0" in code:
            raise UserError("A shell command cannot contain NUL characters.")
        source = code.encode("utf-8", "surrogatepass")
        deadline_s = self.limits.wall_s + GRACE_S
        try:
            answer, blobs = await self._ask({"op": "call"}, [source], deadline_s)
        except _Unanswered:
            return Outcome(timed_out=True, wall_s=deadline_s)
        except _Broken as error:
            return broken_outcome(error.message)
        if "broken" in answer:
            await self.close()
        return outcome_of(answer, blobs)

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the session's folder. Raises UserError and WorldError."""
        await self.change(FileChange(files))

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files. Raises UserError and WorldError."""
        checked_files(dict.fromkeys([*change.executable, *change.remove], b""))
        header = {"op": "change", "names": list(checked_files(change.write)), "remove": sorted(change.remove)}
        await self._ask({**header, "modes": dict(change.executable)}, [*change.write.values()])

    async def snapshot(self) -> Snapshot:
        """Return the regular files. Raises WorldError if they exceed the limits."""
        answer, blobs = await self._ask({"op": "snapshot"}, [])
        if answer.get("cut"):
            raise WorldError(
                "The session's files exceed its limits, or changed during the snapshot.",
                "Increase the limits files_out and files_out_bytes.",
            )
        names, executable, left_out = (answer.get(key) for key in ("names", "executable", "left_out"))
        if not isinstance(names, list) or not isinstance(executable, list) or len(names) != len(blobs):
            raise WorldError("The sandbox sent an invalid snapshot.")
        if not isinstance(left_out, int):
            raise WorldError("The sandbox sent an invalid snapshot.")
        return Snapshot(dict(zip(map(str, names), blobs, strict=True)), frozenset(map(str, executable)), left_out)

    async def processes(self) -> tuple[Process, ...]:
        """List the session's processes, including its interpreter. Raises WorldError above 128
        KiB of text."""
        answer, _ = await self._ask({"op": "processes"}, [])
        if answer.get("cut"):
            raise WorldError("The arguments and variables of the session's processes exceed 128 KiB.")
        found = answer.get("processes")
        if not isinstance(found, list):
            raise WorldError("The sandbox sent an invalid process list.")
        return tuple(map(_process, found))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files by those of the snapshot. Raises WorldError."""
        header = {"op": "restore", "names": list(checked_files(snapshot.files))}
        await self._ask({**header, "executable": sorted(snapshot.executable)}, [*snapshot.files.values()])

    async def reset(self) -> None:
        """Replace the guard with a new one. Raises WorldError."""
        self._check()
        self.wire.close()
        self.home.prepare()
        self.wire = await self.home.guard()
        await self._open({})

    async def close(self) -> None:
        """End the home. Idempotent."""
        if not self._closed:
            self._closed = True
            self.wire.close()
            await self._end()

    async def _open(self, files: Mapping[str, bytes]) -> None:
        header = {"op": "session", "kind": self.kind, **given(self.limits, files)}
        await self._ask(header, [*files.values()])

    async def _ask(
        self, header: Mapping[str, object], blobs: list[bytes], deadline_s: float = 4 * GRACE_S
    ) -> tuple[dict[str, object], list[bytes]]:
        """Send a request and return the response. Raises WorldError; without a response the session is
        closed."""
        self._check()
        asked = False
        try:
            async with asyncio.timeout(deadline_s):
                await self.wire.send(header, blobs)
                answer = await self.wire.read(most_bytes(self.limits), header_bytes(self.limits))
                asked = True
        except TimeoutError as error:
            raise _Unanswered("The guard of a session did not respond; the session was ended.") from error
        except GuardGoneError as error:
            if await self.home.goes_on():
                raise _Broken(error.message) from error
            raise
        except WorldError as error:
            asked = error.message.startswith("The sandbox failed")
            raise
        finally:
            if not asked:
                await asyncio.shield(self.close())
        return answer

    def _check(self) -> None:
        if self._closed:
            raise WorldError("The session is closed.", "Open a new one.")


def _process(told: dict[str, Any]) -> Process:
    """Parse a process. Raises WorldError."""
    try:
        pairs = (str(word).partition("=") for word in told["environment"])
        return Process(
            pid=int(told["pid"]),
            parent=int(told["parent"]),
            started=int(told["started"]),
            state=str(told["state"]),
            title=str(told["title"]),
            program=str(told["program"]),
            folder=str(told["folder"]),
            argv=tuple(map(str, told["argv"])),
            environment={name: value for name, _, value in pairs},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WorldError("The sandbox sent an invalid process list.") from error
