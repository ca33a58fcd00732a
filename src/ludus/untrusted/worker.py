"""Run functions on untrusted data, whose time may be unbounded, in resource-limited processes.

Accepts module-level functions and picklable arguments. The kernel terminates a call at its limit of CPU time,
even inside one long interpreter operation and independently of the machine's load; memory is limited too. Calls run
in a fork of a process that has completed its imports, so the next call does not wait for a new interpreter. The
processes exit with their parent.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import BinaryIO, ParamSpec, TypeVar, cast

from ludus.ipc import frame, python_command, read_frame

CPU_S = 5.0  # CPU seconds of one call of `call_bounded`
MEMORY_BYTES = 2 << 30  # limit of the address space of a process
_PROCESSES = 2
_WALL_TIMEOUT_S = 300.0  # wall-clock timeout of a call that uses no CPU time

P = ParamSpec("P")
T = TypeVar("T")


class LimitExceeded(Exception):
    """A call exceeded its CPU time or memory."""


class ProcessKilled(LimitExceeded):
    """The process of a call was killed by another process or does not respond."""


@dataclass(eq=False)
class LimitedProcess:
    """Process that executes calls one at a time, started by the first one.

    `preload` is a `module:function` without arguments that runs before the first call, outside its limits.
    """

    preload: str = ""
    _running: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, function: Callable[[], T], cpu_s: float) -> T:
        """Return the result, or raise the exception, LimitExceeded (CPU seconds or memory) or ProcessKilled."""
        request = pickle.dumps((function, cpu_s))
        with self._lock:
            if self._running is None:
                command, pipe = python_command("ludus.untrusted.worker:serve", self.preload), subprocess.PIPE
                self._running = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            response = self._send(self._running, request)
        if isinstance(response, Exception):
            raise response
        return cast(T, response)

    def _send(self, running: subprocess.Popen[bytes], request: bytes) -> object:
        stdin, stdout = running.stdin, running.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(frame(request))
            stdin.flush()
            if select.select([stdout], [], [], _WALL_TIMEOUT_S)[0] and (body := read_frame(stdout)) is not None:
                return pickle.loads(body)
        self._running = None
        kill_group(running.pid)
        running.communicate()
        return ProcessKilled("the process of a call exited or does not respond")


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


async def call_bounded(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in one of two processes. Raises its exception, or LimitExceeded above `CPU_S` CPU seconds or memory."""
    pool, call = _pool(os.getpid()), partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(pool.threads, pool.call, call, CPU_S)


@dataclass(eq=False)
class _Pool:
    threads: ThreadPoolExecutor
    idle: list[LimitedProcess] = field(default_factory=list)

    def call(self, function: Callable[[], T], cpu_s: float) -> T:
        process = self.idle.pop() if self.idle else LimitedProcess()
        try:
            return process.call(function, cpu_s)
        finally:
            self.idle.append(process)


@cache
def _pool(pid: int) -> _Pool:
    """Return this process's pool; a forked process gets a new one."""
    del pid
    return _Pool(ThreadPoolExecutor(_PROCESSES, "untrusted"))


def serve(preload: str) -> None:
    """Execute the calls on standard input in a child; fork another one if it is killed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if preload:
        module, _, name = preload.partition(":")
        vars(importlib.import_module(module))[name]()
    with suppress(BrokenPipeError):  # the parent exited
        while child := os.fork():
            _, status = os.waitpid(child, 0)
            if status == 0:
                return
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                _respond(responses, ProcessKilled("the process of a call was killed"))
            else:
                _respond(responses, LimitExceeded("a call exceeded its CPU time or memory"))
        while (request := read_frame(sys.stdin.buffer)) is not None:
            _respond(responses, _run(request))
    os._exit(0)


def _run(request: bytes) -> object:
    call, cpu_s = pickle.loads(request)  # may import modules, which the call's limit excludes
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return call()
    except MemoryError:
        return LimitExceeded("a call exceeded its memory")
    except Exception as error:  # boundary: raised in the caller
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _respond(responses: BinaryIO, result: object) -> None:
    try:
        body = pickle.dumps(result)
    except Exception as error:  # boundary: an unpicklable error is sent as text
        body = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result} ({error})"))
    responses.write(frame(body))
    responses.flush()


def kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes of a group, if it has any."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a child process that has ended; its own children may hold them open."""
    vars(process)["_transport"].close()  # `Process` has no public method for it
