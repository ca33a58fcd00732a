"""What is asked of a guard, wherever it lives: one run, or a session whose interpreter it keeps.

Takes orders, one at a time; gives outcomes; waits for the guard at most a grace beyond the order's own
limits, and ends its whole home after that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import (
    FileChange,
    Limits,
    Outcome,
    Process,
    RunOrder,
    SessionKind,
    Snapshot,
    checked_files,
)
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
    """Where guards live: a cell, or one container after another. Has one guard at a time."""

    async def guard(self) -> Wire:
        """The next guard, which nothing of an earlier one reaches, ready for one order. Raises WorldError."""
        ...

    def prepare(self) -> None:
        """Have the next guard made while nobody waits for it, where that can be."""
        ...

    async def goes_on(self) -> bool:
        """Whether it outlives a guard that broke off, which its program did then."""
        ...

    async def end(self) -> None:
        """End all that is in it and wait until it is gone. Ending twice does no harm."""
        ...


async def run_order(home: Home, order: RunOrder) -> Outcome:
    """One run from a clean start. Raises WorldError; the home is of no more use then.

    A guard that does not answer in time is the program's doing: it timed out, and the home is ended. A guard
    that breaks is too, in a home that goes on: programs reach their guard, and never what holds it.
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
    """The guard said nothing in time, and its home was ended."""


class _Broken(WorldError):
    """The guard broke off, and its home, which went on, was ended."""


Place = TypeVar("Place", bound=Home)


@dataclass(eq=False)
class GuardSession:
    """See `ludus.sandbox.base.SandboxSession`. What breaks the guard ends the session's home."""

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
        """A session in `home`, which `end` ends. Raises WorldError."""
        if kind not in ("python", "shell"):
            raise UserError(f"There is no session of the kind {kind!r}.", "Kinds: python, shell.")
        session = cls(home, await home.guard(), kind, limits, lambda: end(home))
        await session._open(files)
        return session

    async def run(self, code: str) -> Outcome:
        """One call. Raises WorldError where the session is broken or closed.

        A guard that does not answer in time is the program's doing: the call timed out, the session is over.
        So is one that breaks, in a home that goes on.
        """
        if self.kind == "shell" and "\0" in code:
            raise UserError("A command of a shell cannot have NUL characters.")
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
        """Put files into its folder. Raises UserError and WorldError."""
        await self.change(FileChange(files))

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files of its folder. Raises UserError and WorldError."""
        checked_files(dict.fromkeys([*change.executable, *change.remove], b""))
        header = {"op": "change", "names": list(checked_files(change.write)), "remove": sorted(change.remove)}
        await self._ask({**header, "modes": dict(change.executable)}, [*change.write.values()])

    async def snapshot(self) -> Snapshot:
        """Its regular files. Raises WorldError where they are more than the limits let out."""
        answer, blobs = await self._ask({"op": "snapshot"}, [])
        if answer.get("cut"):
            raise WorldError(
                "The session's files are more than its limits let out, or changed meanwhile.",
                "Raise files_out and files_out_bytes of its limits.",
            )
        names, executable, left_out = (answer.get(key) for key in ("names", "executable", "left_out"))
        if not isinstance(names, list) or not isinstance(executable, list) or len(names) != len(blobs):
            raise WorldError("The sandbox sent a snapshot that cannot be read.")
        if not isinstance(left_out, int):
            raise WorldError("The sandbox sent a snapshot that cannot be read.")
        return Snapshot(
            dict(zip(map(str, names), blobs, strict=True)), frozenset(map(str, executable)), left_out
        )

    async def processes(self) -> tuple[Process, ...]:
        """What runs in it, its interpreter too. Raises WorldError for more than 128 KiB of words."""
        answer, _ = await self._ask({"op": "processes"}, [])
        if answer.get("cut"):
            raise WorldError("The session's processes have more arguments and variables than can be told.")
        found = answer.get("processes")
        if not isinstance(found, list):
            raise WorldError("The sandbox sent processes that cannot be read.")
        return tuple(map(_process, found))

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace its files by those of the snapshot. Raises WorldError."""
        header = {"op": "restore", "names": list(checked_files(snapshot.files))}
        await self._ask({**header, "executable": sorted(snapshot.executable)}, [*snapshot.files.values()])

    async def reset(self) -> None:
        """A new guard, and with it nothing of the old one. Raises WorldError."""
        self._check()
        self.wire.close()
        self.home.prepare()
        self.wire = await self.home.guard()
        await self._open({})

    async def close(self) -> None:
        """End its home. Closing twice does no harm."""
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
        """One question and its answer. Raises WorldError; a session without an answer is closed."""
        self._check()
        asked = False
        try:
            async with asyncio.timeout(deadline_s):
                await self.wire.send(header, blobs)
                answer = await self.wire.read(most_bytes(self.limits), header_bytes(self.limits))
                asked = True
        except TimeoutError as error:
            raise _Unanswered("The guard of a session gave no answer; the session was ended.") from error
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
    """A process as the guard tells it. Raises WorldError."""
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
        raise WorldError("The sandbox sent processes that cannot be read.") from error
