"""Call functions, whose time may explode on untrusted data, in processes with limits.

Accepts module-level functions and picklable arguments. A process is started on the first call and after one
was killed; there are at most two. The kernel ends a call after `CPU_S` seconds of CPU time, even inside one
long interpreter operation and independently of the machine's load; memory is limited too. The caller's event
loop is not blocked. The processes end with their parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import BinaryIO, ParamSpec, TypeVar, cast

CPU_S = 5.0
"""CPU seconds of one call."""
MEMORY_BYTES = 2 << 30
"""Address space of a process."""
_NUM_PROCESSES = 2
_WALL_S = 300.0
"""Wall-clock timeout of a call that uses no CPU time."""
_HEAD = struct.Struct(">Q")
_COMMAND = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);from ludus.untrusted.worker import serve;serve()"

P = ParamSpec("P")
T = TypeVar("T")


class LimitExceeded(Exception):
    """A call exceeded its CPU time or memory."""


async def call_bounded(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in another process and return its result or raise its exception.

    Raises LimitExceeded if the process was killed or ran out of memory.
    """
    request = pickle.dumps((partial(function, *args, **kwargs), CPU_S))
    pool = _pool(os.getpid())
    result = await asyncio.get_running_loop().run_in_executor(pool.threads, pool.call, request)
    if isinstance(result, Exception):
        raise result
    return cast(T, result)


@dataclass(eq=False)
class _Process:
    """A process that executes calls one at a time."""

    running: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> _Process:
        command = [sys.executable, "-c", _COMMAND, json.dumps(sys.path)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def call(self, request: bytes) -> object:
        """Execute a call. Raises LimitExceeded; the process has then ended."""
        into, out = self.running.stdin, self.running.stdout
        assert into is not None
        assert out is not None
        try:
            into.write(_HEAD.pack(len(request)) + request)
            into.flush()
            if select.select([out], [], [], _WALL_S)[0] and (head := out.read(_HEAD.size)):
                return pickle.loads(out.read(*_HEAD.unpack(head)))
        except BrokenPipeError:
            pass
        self.running.kill()
        self.running.communicate()
        raise LimitExceeded(f"a call took more than {CPU_S:g} s of CPU time, or too much memory")


@dataclass(eq=False)
class _Pool:
    threads: ThreadPoolExecutor
    idle: list[_Process] = field(default_factory=list)

    def call(self, request: bytes) -> object:
        process = self.idle.pop() if self.idle else _Process.start()
        result = process.call(request)
        self.idle.append(process)
        return result


@cache
def _pool(pid: int) -> _Pool:
    """Return this process's pool; a forked process gets a new one."""
    del pid
    return _Pool(ThreadPoolExecutor(_NUM_PROCESSES, "untrusted"))


def serve() -> None:
    """Execute calls until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while head := sys.stdin.buffer.read(_HEAD.size):
        _send(replies, _result(sys.stdin.buffer.read(*_HEAD.unpack(head))))


def _result(request: bytes) -> object:
    call, cpu_s = pickle.loads(request)  # imports modules, not counted as the call's time
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return call()
    except MemoryError:
        return LimitExceeded("a call took too much memory")
    except Exception as error:  # boundary: raised in the caller
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(replies: BinaryIO, result: object) -> None:
    try:
        data = pickle.dumps(result)
    except Exception as error:  # boundary: an unpicklable error is sent as text
        data = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result} ({error})"))
    replies.write(_HEAD.pack(len(data)) + data)
    replies.flush()
