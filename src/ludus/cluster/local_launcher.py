"""Workers as child processes on this machine, connected by sockets.

The first frame to a child is its pickled `WorkerSpec`. Later frames are numbered requests; an empty frame
cancels the request of its number. The child sends numbered responses and exits when the parent closes the socket,
which a separate thread reads, so that a hanging event loop does not prevent the exit.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ludus.cluster.protocol import (
    Message,
    WorkerDied,
    WorkerHandle,
    WorkerResponse,
    WorkerSpec,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    failure_response,
    log_records,
    start_forwarding,
)
from ludus.cluster.workers import WorkerServer
from ludus.engines.models.loading import hide_progress
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import UserError
from ludus.ipc import LENGTH, frame, python_command, read_frame, split_number, with_number

_TAIL_CHARS = 2000
_KILL_TIMEOUT_S = 10.0


@dataclass
class LocalWorkerHandle:
    """Handle of a child process. Its output goes to the file `output`, which is deleted when the child exits."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _number: int = 0
    _waiting: dict[int, asyncio.Future[WorkerResponse]] = field(default_factory=dict)
    _reading: asyncio.Task[None] = field(init=False)
    tail: str | None = None
    """The end of the output, once the child was killed and its output deleted."""

    def __post_init__(self) -> None:
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: Message, deadline_s: float) -> object:
        if self._reading.done():
            raise self._died_error()
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.writer.write(frame(with_number(number, encode_request(message))))
            async with asyncio.timeout(deadline_s):
                response: WorkerResponse = await future
        except (TimeoutError, asyncio.CancelledError) as error:
            self.writer.write(frame(with_number(number)))
            if isinstance(error, TimeoutError):
                raise WorkerDied(f"{self.name} did not respond within {deadline_s:g} s.") from error
            raise
        finally:
            self._waiting.pop(number, None)
        return response.take()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, _KILL_TIMEOUT_S)
        self.writer.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self.tail = self._output_tail()
        self.output.unlink(missing_ok=True)

    async def _read(self) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
                number, body = split_number(await self.reader.readexactly(length))
                response = decode_response(body)
                log_records(self.name, response.records)
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(response)
        except (asyncio.IncompleteReadError, OSError):
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 1.0)
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._died_error())

    def _died_error(self) -> WorkerDied:
        code, text = self.process.poll(), self._output_tail()
        how = "closed its socket" if code is None else f"has exited ({code})"
        return WorkerDied(f"{self.name} {how}{': ' + text if text else '.'}")

    def _output_tail(self) -> str:
        if self.tail is None:
            with suppress(OSError):
                return self.output.read_text("utf-8", "replace").strip()[-_TAIL_CHARS:]
        return self.tail or ""


@dataclass
class LocalLauncher:
    """Start child processes; their output goes to a temporary folder."""

    _folder: TemporaryFolder | None = None
    _started: list[LocalWorkerHandle] = field(default_factory=list)
    host: str = ""

    async def start(self, name: str, spec: WorkerSpec) -> WorkerHandle:
        """Start a child process. Its resource request is ignored."""
        if self._folder is None:
            self._folder = TemporaryFolder("ludus-cluster-")
        path = self._folder.path / name.replace(" ", "-")
        ours, theirs = socket.socketpair()
        command = python_command("ludus.cluster.local_launcher:run_worker", str(theirs.fileno()))
        null, descriptors = subprocess.DEVNULL, (theirs.fileno(),)
        with theirs, path.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=null, stdout=output, stderr=output, pass_fds=descriptors, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        remote = LocalWorkerHandle(name, process, path, reader, writer)
        self._started = [*(other for other in self._started if other.tail is None), remote]
        writer.write(frame(pickle.dumps(spec)))
        return remote

    async def close(self) -> None:
        for remote in self._started:
            await remote.kill()
        if self._folder is not None:
            self._folder.close()


def run_worker(descriptor: str) -> None:
    """Serve as a worker on the socket with file descriptor `descriptor` until the parent process exits."""
    os.set_inheritable(int(descriptor), False)
    sock = socket.socket(fileno=int(descriptor))
    stream = sock.makefile("rb")
    if (spec := read_frame(stream)) is not None:
        hide_progress()
        asyncio.run(_serve(sock, stream, WorkerServer(pickle.loads(spec), "127.0.0.1", start_forwarding())))


async def _serve(sock: socket.socket, stream: BinaryIO, host: WorkerServer) -> None:
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[int, bytes]]()
    outbox = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(stream, loop, inbox), daemon=True).start()
    threading.Thread(target=_write, args=(sock, outbox), daemon=True).start()
    await serve(inbox, outbox, host)


async def serve(inbox: asyncio.Queue[tuple[int, bytes]], outbox: queue.SimpleQueue[bytes], host: WorkerServer) -> None:
    """Handle numbered requests with `host` and put numbered responses into `outbox`. Never returns."""
    calls: set[asyncio.Task[None]] = set()

    async def respond(number: int, body: bytes) -> None:
        try:
            response = await host.call(number, decode_request(body))
        except UserError as error:
            response = failure_response(error)
        outbox.put(with_number(number, encode_response(response)))

    while True:
        number, body = await inbox.get()
        if not body:
            host.cancel(number)
            continue
        task = asyncio.create_task(respond(number, body))
        calls.add(task)
        task.add_done_callback(calls.discard)
        await asyncio.sleep(0)  # let the task start: the next message may cancel it


def _read(stream: BinaryIO, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[tuple[int, bytes]]) -> None:
    while (body := read_frame(stream)) is not None:
        loop.call_soon_threadsafe(inbox.put_nowait, split_number(body))
    os._exit(0)


def _write(sock: socket.socket, outbox: queue.SimpleQueue[bytes]) -> None:
    while True:
        sock.sendall(frame(outbox.get()))
