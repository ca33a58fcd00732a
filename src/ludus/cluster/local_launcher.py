"""Workers as child processes on this machine, connected by sockets."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ludus.cluster.handles import ResourceRequest, WorkerDied, WorkerHandle
from ludus.cluster.log_forwarding import repeat
from ludus.cluster.pickle_rpc import LENGTH_BYTES, RpcCall, RpcCancel, RpcHello, RpcReply, length_of, pack, unpack
from ludus.cluster.protocol import Message, Spec, WorkerResponse
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import UserError

_LAST_WORDS = 2000
_END_S = 10.0


@dataclass
class LocalWorkerHandle:
    """Handle of a child process. Its output goes to the file `said`, which is deleted when the child ends."""

    name: str
    process: subprocess.Popen[bytes]
    said: Path
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _number: int = 0
    _waiting: dict[int, asyncio.Future[WorkerResponse]] = field(default_factory=dict)
    _reading: asyncio.Task[None] | None = None
    _words: str | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the child was killed and cleaned up."""
        return self._words is not None

    def listen(self) -> None:
        """Start receiving responses."""
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: Message, deadline_s: float) -> object:
        """Send a message and return the response; see `WorkerHandle`."""
        if self._reading is None or self._reading.done():
            raise self._lost()
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.writer.write(_packed(RpcCall(number, message)))
            async with asyncio.timeout(deadline_s):
                answer: WorkerResponse = await future
        except TimeoutError as error:
            self.writer.write(pack(RpcCancel(number)))
            raise WorkerDied(f"{self.name} did not respond within {deadline_s:g} s.") from error
        except asyncio.CancelledError:
            self.writer.write(pack(RpcCancel(number)))
            raise
        finally:
            self._waiting.pop(number, None)
        return answer.take()

    async def kill(self) -> None:
        """Kill the child and its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, _END_S)
        self.writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self._words = self._last_words()
        self.said.unlink(missing_ok=True)

    async def _read(self) -> None:
        try:
            while True:
                body = await self.reader.readexactly(length_of(await self.reader.readexactly(LENGTH_BYTES)))
                match unpack(body):
                    case RpcReply(number=number, answer=answer):
                        repeat(self.name, answer.said)
                        future = self._waiting.get(number)
                        if future is not None and not future.done():
                            future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 1.0)
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._lost())

    def _lost(self) -> WorkerDied:
        code, words = self.process.poll(), self._last_words()
        how = "is gone" if code is None else f"has exited ({code})"
        return WorkerDied(f"{self.name} {how}{': ' + words if words else '.'}")

    def _last_words(self) -> str:
        if self._words is None:
            with suppress(OSError):
                return self.said.read_text("utf-8", "replace").strip()[-_LAST_WORDS:]
        return self._words or ""


@dataclass
class LocalLauncher:
    """Start child processes; their output goes to a temporary folder."""

    _folder: TemporaryFolder | None = None
    _started: list[LocalWorkerHandle] = field(default_factory=list)
    host: str = ""

    async def start(self, name: str, spec: Spec, needs: ResourceRequest) -> WorkerHandle:
        """Start a child; resources are not checked."""
        del needs
        if self._folder is None:
            self._folder = TemporaryFolder("ludus-cluster-")
        said = self._folder.path / name.replace(" ", "-")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ludus.cluster.worker_main", str(theirs.fileno())]
        with theirs, said.open("wb") as words:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        remote = LocalWorkerHandle(name, process, said, reader, writer)
        self._started = [*(other for other in self._started if not other.is_ended), remote]
        remote.listen()
        writer.write(pack(RpcHello(spec)))
        return remote

    async def close(self) -> None:
        """Kill all children."""
        for remote in self._started:
            await remote.kill()
        if self._folder is not None:
            self._folder.close()


def _packed(call: RpcCall) -> bytes:
    try:
        return pack(call)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"A rollout request cannot be sent to another process: {error}.", "Tasks and their truth must be picklable."
        ) from error
