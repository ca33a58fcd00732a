"""Backend without isolation: a child process with resource limits.

It protects only against accidents: programs can access everything that this user can, use the network, and leave
processes behind. Requires `unsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Outcome, RunRequest, Sandbox
from ludus.sandbox.guest.files import CollectedFiles, write_files
from ludus.sandbox.guest.procfs import peak_memory
from ludus.sandbox.guest.streams import ProcessStreams
from ludus.sandbox.guest.syscalls import ResourceLimits

_POLL_S = 0.02

_LAUNCH = """
import json, os, resource, sys
for kind, value in json.loads(sys.argv[1]):
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error}", file=sys.stderr)
    os._exit(127)
"""


@dataclass(eq=False)
class ProcessSandbox(Sandbox):
    """The process backend. `unsafe` must be set explicitly."""

    name = "process"
    unsafe: bool = False

    def __post_init__(self) -> None:
        if not self.unsafe:
            hint = "Use the namespaces backend, or set sandbox.unsafe = true if every program is trusted."
            raise UserError("The process backend has no isolation: programs have all of your access rights.", hint)

    async def _run(self, request: RunRequest) -> Outcome:
        stop = threading.Event()
        task = asyncio.ensure_future(asyncio.to_thread(_run_in_folder, request, stop))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([task])
            raise

    async def close(self) -> None:
        """Do nothing: runs share no resources."""


def _run_in_folder(request: RunRequest, stop: threading.Event) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="ludus-process-") as name:
        box, files = Path(name, "box"), dict(request.files)
        box.mkdir()
        write_files(files, set(), str(box))
        argv = request.argv
        if request.source is not None:
            main = Path(name, "main.py")
            main.write_bytes(request.source)
            argv = (sys.executable, "-s", str(main))
        limits = request.limits  # processes are not limited, since the kernel counts all of a user's
        rlimits = {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_CPU: int(limits.cpu_s) + 1,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_FSIZE: limits.file_bytes,
            resource.RLIMIT_CORE: 0,
        }
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, json.dumps([*rlimits.items()]), *argv]
        outcome = _run_child(launch, box, request, stop)
        changed = CollectedFiles(ResourceLimits(asdict(limits)), files, str(box))
    return replace(outcome, files=changed.files, truncated=outcome.truncated or changed.cut or changed.skipped > 0)


def _run_child(argv: Sequence[str], box: Path, request: RunRequest, stop: threading.Event) -> Outcome:
    """Run a child in its own process group until it ends, exceeds its time or `stop` is set. Raises WorldError."""
    streams = ProcessStreams(request.limits.output_bytes)
    begin, timed_out, own_peak, peak = time.monotonic(), False, peak_memory("self"), 0
    stdin, stdout, stderr = streams.child_fds
    env = {"PATH": os.defpath, "HOME": str(box), "LANG": "C.UTF-8", "PYTHONPATH": str(box)}
    try:
        child = subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=box, env=env, start_new_session=True
        )
    except OSError as error:
        streams.close()
        raise WorldError(f"A process cannot be started: {error}.") from error
    pidfd = os.pidfd_open(child.pid)
    streams.poll.register(pidfd, select.POLLIN)
    streams.start(request.stdin)
    try:
        while not timed_out and not stop.is_set():
            ready = dict(streams.poll.poll(_POLL_S * 1000))
            streams.transfer(ready)
            if pidfd in ready:
                break
            timed_out = time.monotonic() - begin > request.limits.wall_s
            peak = max(peak, peak_memory(str(child.pid)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = status
        os.close(pidfd)
        output, errors = streams.drain()
        streams.close()
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if ended_by is None else None
    return Outcome(
        stdout=output,
        stderr=errors,
        exit=code,
        signal=ended_by,
        timed_out=timed_out or ended_by == signal.SIGXCPU,
        memory_exceeded=request.source is not None and code == 1 and b"MemoryError" in errors[-200:],
        truncated=streams.omitted_bytes > 0,
        omitted_bytes=streams.omitted_bytes,
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=time.monotonic() - begin,
        # A ru_maxrss up to this process's own peak may be inherited from before exec.
        peak_memory_bytes=used.ru_maxrss * 1024 if used.ru_maxrss * 1024 > own_peak else peak,
    )
