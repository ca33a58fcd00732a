"""Requests to a supervisor: one run, or a session with a persistent interpreter.

One request at a time. A supervisor that does not respond within a grace period after the request's limits is killed
with its host. Responses are untrusted: their format and size are checked.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import (
    FileChange,
    Limits,
    Outcome,
    Process,
    RunRequest,
    Sandbox,
    SandboxSession,
    SandboxSettings,
    SessionKind,
    Snapshot,
    sessions_in_memory,
    validate_files,
)
from ludus.sandbox.guest.files import MAX_PATH_CHARS
from ludus.sandbox.guest.wire import frame_sizes, pack_request, string_list, unpack_frame

GRACE_S = 8.0
CHUNK = 1 << 16
_HEADER_BYTES = 1 << 20
"""Maximum size of a response's header without names; it lists each file and each executable file."""
_ESCAPED_BYTES = 12  # maximum length of a JSON-escaped character

Header = dict[str, Any]  # header of a response, decoded from JSON and not validated
Frame = tuple[Header, list[bytes]]
_OUTCOME: dict[str, Callable[[object], Any]] = {
    **dict.fromkeys(("exit", "signal"), lambda value: None if value is None else int(str(value))),
    **dict.fromkeys(("timed_out", "memory_exceeded", "truncated"), lambda value: value is True),
    **dict.fromkeys(("omitted_bytes", "peak_memory_bytes"), lambda value: int(str(value))),
    **dict.fromkeys(("cpu_s", "wall_s"), lambda value: float(str(value))),
}
"""Conversions of the fields of a header."""


class SupervisorLostError(WorldError):
    """A supervisor ended without a response."""


@dataclass
class SupervisorSocket:
    """The host's end of the connection to a supervisor."""

    sock: socket.socket
    _received: bytearray = field(default_factory=bytearray)

    async def send(self, header: Mapping[str, object], blobs: list[bytes]) -> None:
        """Send a frame. Raises WorldError if the supervisor is lost."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.sock, pack_request(dict(header), blobs))
        except OSError as error:
            raise SupervisorLostError(f"The sandbox connection was lost: {error}.") from error

    async def receive(self, max_body: int, max_header: int = _HEADER_BYTES) -> Frame:
        """Receive a frame with at most `max_body` bytes of blobs and `max_header` of header. Raises WorldError."""
        header_size, body_size = frame_sizes(await self._receive_exactly(8))
        if header_size > max_header or body_size > max_body:
            message = f"The sandbox sent a frame of {header_size} + {body_size} bytes, more than its limits allow."
            raise WorldError(message)
        try:
            text, body = await self._receive_exactly(header_size), await self._receive_exactly(body_size)
            header, blobs = unpack_frame(json.loads(text), body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorldError("The sandbox sent an invalid frame.") from error
        if "error" in header:
            raise WorldError(f"The sandbox failed: {header['error']}.")
        return header, blobs

    def close(self) -> None:
        """Close the socket; the supervisor then kills its programs and exits."""
        self.sock.close()

    async def _receive_exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._received) < count:
            try:
                if not (part := await loop.sock_recv(self.sock, CHUNK)):
                    raise OSError("it was killed, or the machine is out of memory")
            except OSError as error:
                raise SupervisorLostError(f"The sandbox connection was lost: {error}.") from error
            self._received += part
        data = bytes(self._received[:count])
        del self._received[:count]
        return data


class SupervisorHost(ABC):
    """Starts supervisors, one at a time: a zygote, or a series of containers."""

    @abstractmethod
    async def start_supervisor(self) -> SupervisorSocket:
        """Return a new supervisor, isolated from earlier ones, for one request. Raises WorldError."""

    @abstractmethod
    def prefork(self) -> None:
        """Start the next supervisor in advance, if supported."""

    @abstractmethod
    async def survives(self) -> bool:
        """Return whether the host still works after a supervisor was lost; if so, the program caused the loss."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill all processes inside and wait for them. Idempotent."""


async def run_request(host: SupervisorHost, request: RunRequest) -> Outcome:
    """Run once from a clean state. Raises WorldError; the host is then unusable.

    If the supervisor does not respond in time, the outcome is a timeout and the host is killed. If the supervisor is
    lost but the host survives, the program is at fault: programs can reach their supervisor, but not its host.
    """
    sock = await host.start_supervisor()
    limits, begin = request.limits, time.monotonic()
    header = {"op": "run", "argv": list(request.argv), "limits": asdict(limits), "names": list(request.files)}
    blobs = [request.stdin, request.source or b"", *request.files.values()]
    try:
        response = await _exchange(host, sock, limits, header, blobs, limits.wall_s + GRACE_S)
    except _ProgramFaultError as error:
        await host.kill()
        return error.outcome(time.monotonic() - begin)
    finally:
        sock.close()
    host.prefork()
    return _parse_outcome(*response)


class _ProgramFaultError(WorldError):
    """The program prevented a response: the supervisor timed out, or was lost although its host survives."""

    def outcome(self, wall_s: float) -> Outcome:
        if isinstance(self.__cause__, TimeoutError):
            return Outcome(timed_out=True, wall_s=wall_s)
        return _broken_outcome(self.message)


async def _exchange(
    host: SupervisorHost, sock: SupervisorSocket, limits: Limits, header: Header, blobs: list[bytes], deadline_s: float
) -> Frame:
    try:
        async with asyncio.timeout(deadline_s):
            await sock.send(header, blobs)
            max_header = _HEADER_BYTES + 2 * _ESCAPED_BYTES * MAX_PATH_CHARS * limits.files_out
            return await sock.receive(2 * limits.output_bytes + limits.files_out_bytes, max_header)
    except TimeoutError as error:
        raise _ProgramFaultError("The supervisor of a session did not respond; the session was closed.") from error
    except SupervisorLostError as error:
        if await host.survives():
            raise _ProgramFaultError(error.message) from error
        raise


Host = TypeVar("Host", bound=SupervisorHost)


@dataclass(eq=False)
class SupervisorSandbox(Sandbox, Generic[Host]):
    """Base class of backends with supervisors. `_open` are all hosts in use."""

    settings: SandboxSettings = field(default_factory=SandboxSettings)
    _open: set[Host] = field(default_factory=set, init=False)

    @property
    def max_sessions(self) -> int:
        return self.settings.sessions or sessions_in_memory()

    async def close(self) -> None:
        await asyncio.gather(*map(self._kill, list(self._open)))

    @abstractmethod
    async def _new_host(self, limits: Limits) -> Host:
        """Start a host for a run or session and add it to `_open`."""

    async def _kill(self, host: Host) -> None:
        self._open.discard(host)
        await host.kill()

    async def _open_session(self, kind: SessionKind, files: Mapping[str, bytes], limits: Limits) -> SandboxSession:
        """Open a session in a separate host, which is killed when the session closes or fails to start."""
        host = await self._new_host(limits)
        try:
            session = SupervisedSession(self, host, await host.start_supervisor(), kind, limits)
            await session.start(files)
        except BaseException:
            await asyncio.shield(self._kill(host))
            raise
        return session


@dataclass(eq=False)
class SupervisedSession(SandboxSession, Generic[Host]):
    """A session of a supervisor. A failure of the supervisor ends the session and its host."""

    sandbox: SupervisorSandbox[Host]
    host: Host
    sock: SupervisorSocket
    kind: SessionKind
    limits: Limits
    _closed: bool = False

    async def start(self, files: Mapping[str, bytes]) -> None:
        header = {"op": "session", "kind": self.kind, "limits": asdict(self.limits), "names": list(files)}
        await self._request(header, [*files.values()])

    async def run(self, code: str) -> Outcome:
        """Run a call. A supervisor without response, or that its program has ended, closes the session."""
        if self.kind == "shell" and "\0" in code:
            raise UserError("A shell command cannot contain NUL characters.")
        deadline_s = self.limits.wall_s + GRACE_S
        try:
            header, blobs = await self._request({"op": "call"}, [code.encode("utf-8", "surrogatepass")], deadline_s)
        except _ProgramFaultError as error:
            return error.outcome(deadline_s)
        if "broken" in header:
            await self.close()
        return _parse_outcome(header, blobs)

    async def change(self, change: FileChange) -> None:
        validate_files(dict.fromkeys([*change.executable, *change.remove], b""))
        header = {"op": "change", "names": list(validate_files(change.write)), "remove": sorted(change.remove)}
        await self._request({**header, "executable": dict(change.executable)}, [*change.write.values()])

    async def snapshot(self) -> Snapshot:
        header, blobs = await self._request({"op": "snapshot"}, [])
        if header.get("cut"):
            hint = "Increase the limits files_out and files_out_bytes."
            raise WorldError("The session's files exceed its limits, or changed during the snapshot.", hint)
        try:
            files = dict(zip(string_list(header["names"]), blobs, strict=True))
            return Snapshot(files, frozenset(string_list(header["executable"])), int(str(header["skipped"])))
        except (ValueError, KeyError) as error:
            raise WorldError("The sandbox sent an invalid snapshot.") from error

    async def processes(self) -> tuple[Process, ...]:
        header, _ = await self._request({"op": "processes"}, [])
        if header.get("cut"):
            raise WorldError("The arguments and variables of the session's processes exceed 128 KiB.")
        try:
            return tuple(map(_parse_process, header["processes"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WorldError("The sandbox sent an invalid process list.") from error

    async def restore(self, snapshot: Snapshot) -> None:
        header = {"op": "restore", "names": list(validate_files(snapshot.files))}
        await self._request({**header, "executable": sorted(snapshot.executable)}, [*snapshot.files.values()])

    async def reset(self) -> None:
        self._check_open()
        self.sock.close()
        self.host.prefork()
        self.sock = await self.host.start_supervisor()
        await self.start({})

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sock.close()
            await self.sandbox._kill(self.host)

    async def _request(self, header: Header, blobs: list[bytes], deadline_s: float = 4 * GRACE_S) -> Frame:
        self._check_open()
        try:
            return await _exchange(self.host, self.sock, self.limits, header, blobs, deadline_s)
        except BaseException as error:
            if not (isinstance(error, WorldError) and error.message.startswith("The sandbox failed")):
                await asyncio.shield(self.close())
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise WorldError("The session is closed.", "Open a new one.")


def _broken_outcome(reason: str) -> Outcome:
    return Outcome(stderr=f"[{reason}]".encode(errors="replace"), signal=signal.SIGKILL, truncated=True)


def _parse_outcome(header: Header, blobs: list[bytes]) -> Outcome:
    if "broken" in header:
        return _broken_outcome(f"The supervisor failed: {header['broken']}.")
    try:
        stdout, stderr, *contents = blobs
        files = dict(zip(string_list(header["names"]), contents, strict=True))
        return Outcome(stdout, stderr, files=files, **{name: read(header[name]) for name, read in _OUTCOME.items()})
    except (ValueError, KeyError) as error:
        raise WorldError("The sandbox sent an invalid outcome.") from error


def _parse_process(header: Header) -> Process:
    numbers = {name: int(str(header[name])) for name in ("pid", "parent", "started")}
    texts = {name: str(header[name]) for name in ("state", "title", "program", "folder")}
    environment = {name: str(value) for name, value in header["environment"].items()}
    fields: Header = {**numbers, **texts, "argv": tuple(string_list(header["argv"])), "environment": environment}
    return Process(**fields)
