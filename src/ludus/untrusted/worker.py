"""Run functions in other processes with limits: on untrusted data, whose time may be unbounded, and rewards.

Accepts module-level functions and picklable arguments. `faulthandler` writes the stack of a call that exceeds its CPU
or wall-clock time, or crashes, to the socket of its process, even inside one long interpreter operation, and the
process exits. Processes are forked from a server that has completed its imports, so a new one starts without delay.
All of them exit with their parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from ludus.errors import LudusError
from ludus.ipc import LENGTH, frame, python_command, read_frame

CPU_S = 5.0  # CPU seconds of one call of `call_bounded`
MEMORY_BYTES = 2 << 30  # limit of the address space of a process
_PROCESSES = 2
_WALL_TIMEOUT_S = 300.0  # wall-clock timeout of a call that uses no CPU time
_GRACE_S = 30.0  # time after the wall-clock timeout before a process counts as exited
_PDEATHSIG = 1

P = ParamSpec("P")
T = TypeVar("T")


class LimitExceeded(Exception):
    """A call exceeded its time or memory or crashed; the message may contain its stack, after `TIMED_OUT` if late."""


TIMED_OUT = "Timeout ("  # beginning of the stack of a call that exceeded its wall-clock time


class ProcessKilled(LimitExceeded):
    """The process of a call exited, was killed by another process or does not respond."""


class UnreadableCall(Exception):
    """A call cannot be pickled, or its process cannot unpickle it."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """Exception of a call; `late` if it was caused by a timeout."""

    error: Exception
    late: bool = False


@dataclass(eq=False)
class LimitedProcess:
    """Process that executes calls one at a time, started by the first one.

    `preload` are comma-separated modules that are imported before the first call, outside its limits; those of the form
    `module:function` also call a function without arguments. If `memory_bytes` is 0, memory is unlimited.
    """

    preload: str = ""
    memory_bytes: int = MEMORY_BYTES
    _conn: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and did not exit during a call."""
        return self._conn is not None

    def call(self, function: Callable[[], T], cpu_s: float = 0.0, wall_s: float = _WALL_TIMEOUT_S) -> T:
        """Return the result; `cpu_s` 0 is unlimited.

        Raises the exception of the function, LimitExceeded, ProcessKilled or UnreadableCall.
        """
        try:
            request = frame(pickle.dumps((cpu_s, wall_s, pickle.dumps(function))))
        except Exception as error:  # boundary: foreign types may raise anything
            raise UnreadableCall(f"{type(error).__name__}: {error}") from error
        with self._lock:
            response = self._exchange(request, wall_s + _GRACE_S)
        if isinstance(response, _Raised):
            raise response.error from TimeoutError() if response.late else None
        return cast(T, response)

    def close(self) -> None:
        """Disconnect the process, which exits after its call; a running call raises ProcessKilled."""
        conn, self._conn = self._conn, None
        if conn is not None:
            with suppress(OSError):  # already closed at the other end
                conn.shutdown(socket.SHUT_RDWR)
            if not self._lock.locked():  # otherwise the running call closes it
                conn.close()

    def __del__(self) -> None:
        if self._conn is not None:
            self._conn.close()

    def _exchange(self, request: bytes, timeout_s: float) -> object:
        was_running, stack = self.is_running, b""
        conn = self._conn = self._conn or _fork_server(os.getpid(), self.preload).fork(self.memory_bytes)
        conn.settimeout(timeout_s)
        try:
            with conn.makefile("rb") as stream:
                conn.sendall(request)
                stack = stream.read(LENGTH.size)
                if len(stack) == LENGTH.size and stack[0] == 0:  # a length prefix
                    (length,) = LENGTH.unpack(stack)
                    body, stack = stream.read(length), b""
                    if len(body) == length:
                        return pickle.loads(body)
                else:
                    stack += stream.read()
        except OSError as error:
            was_closed = self._conn is not conn
            if was_running and not was_closed and isinstance(error, ConnectionError):  # it exited since the last call
                conn.close()
                self._conn = None
                return self._exchange(request, timeout_s)
        conn.close()
        self._conn = None
        if stack:
            raise LimitExceeded(stack.decode("utf-8", "replace"))
        raise ProcessKilled("the process of a call exited")


@dataclass(eq=False)
class ProcessPool:
    """At most `size` processes per event loop, for calls from any event loop."""

    size: int
    preload: str = ""
    memory_bytes: int = MEMORY_BYTES
    _idle: list[LimitedProcess] = field(default_factory=list)
    _slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)

    async def run(self, work: Callable[[LimitedProcess], T]) -> T:
        """Return the result of `work` with an idle process, computed on a thread; cancellation closes the process."""
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.size)):
            process = self._idle.pop() if self._idle else LimitedProcess(self.preload, self.memory_bytes)
            try:
                return await asyncio.wrap_future(run_in_thread("process-call", partial(work, process)))
            except asyncio.CancelledError:
                process.close()
                raise
            finally:
                self._idle.append(process)


@cache
def _pool(pid: int) -> ProcessPool:
    """Return this process's pool; a forked process gets a new one."""
    del pid
    return ProcessPool(_PROCESSES)


async def call_bounded(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in one of two processes. Raises its exception, or LimitExceeded above `CPU_S` CPU seconds or memory."""
    call = partial(function, *args, **kwargs)
    return await _pool(os.getpid()).run(lambda process: process.call(call, CPU_S))


def run_in_thread(name: str, function: Callable[[], T]) -> Future[T]:
    """Run a plain function in a new daemon thread, so that a hanging one blocks neither calls nor process exit."""
    future: Future[T] = Future()

    def work() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # boundary: raised in the task that awaits the future
                future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


@dataclass(eq=False)
class _ForkServer:
    preload: str
    _control: socket.socket | None = None
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fork(self, memory_bytes: int) -> socket.socket:
        """Fork a process and return its socket."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):
                control = self._control = self._control or self._start()
                try:
                    socket.send_fds(control, [str(memory_bytes).encode()], [theirs.fileno()])
                    break
                except OSError:  # the server has exited
                    control.close()
                    self._control = None
        return ours

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = python_command("ludus.untrusted.worker:fork_on_demand", str(theirs.fileno()), self.preload)
            fds, null = [theirs.fileno()], subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=null, pass_fds=fds, start_new_session=True)
        return ours


@cache
def _fork_server(pid: int, preload: str) -> _ForkServer:
    """Return the fork server of a process; a forked process starts another one."""
    del pid
    return _ForkServer(preload)


def fork_on_demand(control: str, preload: str) -> None:
    """Fork a process per socket received on `control`, with its memory limit, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module, _, function in (one.partition(":") for one in preload.split(",") if one):
        with suppress(ImportError):  # raised again by the call that needs it
            loaded = importlib.import_module(module)
            if function:
                vars(loaded)[function]()
    with socket.socket(fileno=int(control)) as requests:
        while True:
            memory_bytes, descriptors, _, _ = socket.recv_fds(requests, 100, 1)
            if not descriptors:
                return
            if os.fork() == 0:
                requests.close()
                _serve(socket.socket(fileno=descriptors[0]), int(memory_bytes))
                os._exit(0)
            os.close(descriptors[0])


def _serve(conn: socket.socket, memory_bytes: int) -> None:
    """Execute calls until the other end of the socket is closed."""
    with suppress(AttributeError, OSError):  # not on Linux: exits at its next response
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    faulthandler.enable(conn.fileno())
    faulthandler.register(signal.SIGPROF, conn.fileno(), all_threads=False, chain=True)  # then the default: exit
    with suppress(ConnectionError), conn.makefile("rb") as stream:
        while (request := read_frame(stream)) is not None:
            conn.sendall(frame(_response(request, conn)))


def _response(request: bytes, conn: socket.socket) -> bytes:
    cpu_s, wall_s, call = pickle.loads(request)
    try:
        function = pickle.loads(call)  # may import modules, which the limits exclude
    except Exception as error:  # boundary: foreign types may raise anything
        return pickle.dumps(_Raised(UnreadableCall(f"{type(error).__name__}: {error}")))
    faulthandler.dump_traceback_later(wall_s, exit=True, file=conn.fileno())
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return pickle.dumps(function())
    except MemoryError:
        raised = _Raised(LimitExceeded("a call exceeded its memory"))
    except Exception as error:  # boundary: raised in the caller
        raised = _Raised(error, isinstance(error.__cause__, TimeoutError))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
    try:
        pickle.loads(body := pickle.dumps(raised))
    except Exception:  # boundary: an error that cannot be pickled is sent as text
        body = pickle.dumps(_Raised(LudusError(f"{type(raised.error).__name__}: {raised.error}"), raised.late))
    return body
