"""Process 1 of a sandbox: the zygote of the namespaces backend, or the supervisor of a container.

The supervisor serves one run, or a session of several calls, and starts, monitors and kills the programs.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import os
import select
import struct
import sys
import time

from ludus.sandbox.guest.files import CollectedFiles, clear_box, remove_files, set_executable, write_files
from ludus.sandbox.guest.procfs import ResourceUsage, list_processes, reaped_cpu_s
from ludus.sandbox.guest.program import (
    BOX,
    SHELL_LOOP,
    become_program,
    run_command,
    run_python,
    serve_python,
    shut_down,
)
from ludus.sandbox.guest.streams import ProcessStreams
from ludus.sandbox.guest.syscalls import (
    BIND,
    LIBC,
    NODEV,
    NOEXEC,
    NOSUID,
    REMOUNT,
    ResourceLimits,
    Suppress,
    check_result,
    mount,
    set_dumpable,
    signal,
    write_text,
)
from ludus.sandbox.guest.wire import Connection, Disconnected, string_list

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Callable

    Response = tuple[dict[str, object], list[bytes]]

_IDLE_S = 0.1
_SAMPLE_S = 0.01
_START_FAILED = 70


class Supervisor:
    """Runs one program at a time with its three streams."""

    streams: ProcessStreams

    def __init__(self, connection: Connection, seccomp: bytes, limits: ResourceLimits) -> None:
        self.connection, self.seccomp, self.limits = connection, seccomp, limits
        self.usage = ResourceUsage()
        self.child = self.pidfd = self.done_fd = self.call_status = -1
        self.wait_status: int | None = None

    def start(self, body: Callable[[], int], stdin: bytes, extra: tuple[int, ...] = ()) -> None:
        """Fork a program whose exit code is `body()`. `extra` become its descriptors 3 and up."""
        self.streams = streams = ProcessStreams(self.limits.output_bytes)
        self.child = os.fork()
        if self.child == 0:
            status = _START_FAILED
            try:
                become_program(self.limits, self.seccomp, [*streams.child_fds, *extra])
                status = shut_down(body())
            except BaseException as error:  # boundary: a fork must never continue as its parent
                os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(status)
        for fd in extra:
            os.close(fd)
        self.pidfd, self.wait_status = os.pidfd_open(self.child), None
        for fd in (self.connection.source, self.pidfd):
            streams.poll.register(fd, select.POLLIN)
        streams.start(stdin)

    def watch(self, cpu_before_s: float) -> str:
        """Return 'ended', 'done' (a call), or the exceeded limit ('time', 'memory'); `cpu_before_s` does not count."""
        begin = sampled = time.monotonic()
        while True:
            event = self._handle(dict(self.streams.poll.poll(_SAMPLE_S * 1000)))
            now = time.monotonic()
            if not event and now - begin > self.limits.wall_s:
                event = "time"
            if not event and now - sampled >= _SAMPLE_S:
                sampled, event = now, self.exceeded(cpu_before_s)
            if event:
                return event

    def _handle(self, ready: dict[int, int]) -> str:
        """Handle the ready descriptors; return "" while the program runs."""
        if self.connection.source in ready:
            raise Disconnected
        self.streams.transfer(ready)
        if self.pidfd in ready:
            return "ended"
        if self.done_fd in ready:
            if statuses := os.read(self.done_fd, 65536):
                self.call_status = statuses[-1]
                return "done"
            self.streams.poll.unregister(self.done_fd)  # the interpreter closed the pipe and will exit
        return ""

    def exceeded(self, cpu_before_s: float) -> str:
        """Reap orphans and return the exceeded limit ('time' or 'memory') or "". See `watch`."""
        self.reap(os.WNOHANG)
        memory, cpu_s = self.usage.sample(self.limits.memory_bytes)
        if memory > self.limits.memory_bytes:
            return "memory"
        return "time" if cpu_s + reaped_cpu_s() - cpu_before_s > self.limits.cpu_s else ""

    def reap(self, flags: int) -> None:
        """Record processes that ended; without WNOHANG wait until none is left."""
        with Suppress(ChildProcessError):
            while (ended := os.wait4(-1, flags))[0]:
                pid, status, used = ended
                self.usage.peak = max(self.usage.peak, used.ru_maxrss * 1024)
                if pid == self.child:
                    self.wait_status = status

    def kill_all(self) -> None:
        """Kill all processes of the namespace except this one, and wait for them."""
        with Suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)

    def close(self) -> None:
        """Close the ended program's descriptors."""
        self.streams.close()
        for fd in (self.pidfd, self.done_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.done_fd = -1


def serve_request(
    connection: Connection, seccomp: bytes, set_up: Callable[[], None], in_container: bool = False
) -> None:
    """Set up this process and serve one run or session; failures of the supervisor itself are reported to the host.

    In a container, the engine sets the size of the box and the process limit: the kernel would count the user's
    processes of all containers.
    """
    try:
        set_up()
        connection.send({"ready": True}, [])
        header, blobs = connection.receive()
        limits = ResourceLimits(header["limits"])
        if in_container:
            limits.processes = 0
        else:
            sizes = f"size={limits.disk_bytes},nr_inodes={limits.disk_files}"
            mount(None, BOX, None, REMOUNT | NOSUID | NODEV, sizes)
        supervisor = Supervisor(connection, seccomp, limits)
        names = string_list(header["names"])
        if header["op"] == "run":
            stdin, source, *contents = blobs
            files = dict(zip(names, contents, strict=True))
            connection.send(*_run(supervisor, string_list(header["argv"]), stdin, source, files))
        else:
            write_files(dict(zip(names, blobs, strict=True)), set())
            connection.send({}, [])
            _Session(supervisor, header["kind"]).serve()
    except Disconnected:
        return
    except BaseException as error:  # boundary: a fork must never continue as its parent
        with Suppress(Disconnected):
            connection.send({"error": f"{type(error).__name__}: {error}"}, [])


def _run(supervisor: Supervisor, argv: list[str], stdin: bytes, source: bytes, files: dict[str, bytes]) -> Response:
    begin = time.monotonic()
    write_files(files, set())
    text = source.decode("utf-8", "surrogatepass")
    supervisor.start(lambda: run_command(argv) if argv else run_python(text), stdin)
    return _blame_program(lambda: _finish_run(supervisor, begin, files, is_python=not argv))


def _finish_run(supervisor: Supervisor, begin: float, files: dict[str, bytes], is_python: bool) -> Response:
    """Wait for the end of the program, kill all processes and collect the files that differ from `files`."""
    try:
        event = supervisor.watch(0.0)
    finally:
        supervisor.kill_all()
    stdout, stderr = supervisor.streams.drain()
    header = _outcome(supervisor, event, begin, reaped_cpu_s())
    if is_python and header["exit"] == 1 and b"MemoryError" in stderr[-200:]:
        header["memory_exceeded"] = True
    changed = CollectedFiles(supervisor.limits, files)
    header["truncated"] = supervisor.streams.omitted_bytes > 0 or changed.cut or changed.skipped > 0
    return {**header, "names": list(changed.files)}, [stdout, stderr, *changed.files.values()]


def _blame_program(respond: Callable[[], Response]) -> Response:
    """Call `respond` and convert errors, which the running program causes, to a response. Raises Disconnected."""
    try:
        return respond()
    except Disconnected:
        raise
    except Exception as error:  # boundary: a program can break its supervisor in any way
        return {"broken": f"{type(error).__name__}: {error}"}, []


def _outcome(supervisor: Supervisor, event: str, begin: float, cpu_s: float) -> dict[str, object]:
    status, omitted = supervisor.wait_status, supervisor.streams.omitted_bytes
    ended_by = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
    return {
        "exit": os.WEXITSTATUS(status) if status is not None and ended_by is None else None,
        "signal": ended_by,
        "timed_out": event == "time" or ended_by == signal.SIGXCPU,
        "memory_exceeded": event == "memory",
        "truncated": omitted > 0,
        "omitted_bytes": omitted,
        "cpu_s": round(max(0.0, cpu_s), 6),
        "wall_s": round(time.monotonic() - begin, 6),
        "peak_memory_bytes": supervisor.usage.peak,
    }


class _Session:
    """Session with an interpreter, which is restarted if a call ended it."""

    def __init__(self, supervisor: Supervisor, kind: object) -> None:
        self.supervisor, self.kind = supervisor, kind
        self.calls_fd = -1
        self.cpu_before_s = 0.0
        self.exceeded = ""

    def serve(self) -> None:
        connection = self.supervisor.connection
        poll = select.poll()
        poll.register(connection.source, select.POLLIN)
        self._start()
        while True:
            if not poll.poll(_IDLE_S * 1000):
                self._check_limits()
                continue
            header, blobs = connection.receive()
            try:
                response = self._respond(header, blobs)
            except OSError as error:
                response = {"error": str(error)}, []
            connection.send(*response)

    def _respond(self, header: dict[str, object], blobs: list[bytes]) -> Response:
        limits = self.supervisor.limits
        names = string_list(header.get("names", []))
        if header["op"] == "call":
            return _blame_program(lambda: self._call(blobs[0]))
        if header["op"] == "snapshot":
            found = CollectedFiles(limits, {})
            header = {"names": list(found.files), "executable": sorted(found.executable)}
            return {**header, "cut": found.cut, "skipped": found.skipped}, [*found.files.values()]
        if header["op"] == "processes":
            processes, cut = list_processes()
            return {"processes": processes, "cut": cut}, []
        if header["op"] == "restore":
            clear_box(4 * limits.disk_files)
            write_files(dict(zip(names, blobs, strict=True)), set(string_list(header["executable"])))
        elif header["op"] == "change":
            flags = header["executable"]
            write_files(dict(zip(names, blobs, strict=True)), set())
            set_executable(flags if isinstance(flags, dict) else {})
            remove_files(string_list(header["remove"]))
        else:
            raise OSError(f"unknown operation {header['op']!r}")
        return {}, []

    def _start(self) -> None:
        (calls_fd, self.calls_fd), (done_fd, child_done_fd) = os.pipe(), os.pipe()
        shell = ["bash", "--norc", "--noprofile", "-c", SHELL_LOOP]
        body = serve_python if self.kind == "python" else lambda: run_command(shell)
        self.supervisor.start(body, b"", (calls_fd, child_done_fd))
        os.set_blocking(done_fd, False)
        self.supervisor.done_fd = done_fd
        self.supervisor.streams.poll.register(done_fd, select.POLLIN)

    def _kill(self) -> None:
        self.supervisor.kill_all()
        os.close(self.calls_fd)
        self.calls_fd = -1

    def _check_limits(self) -> None:
        if self.calls_fd >= 0:
            exceeded = self.supervisor.exceeded(self.cpu_before_s)
            if exceeded or self.supervisor.wait_status is not None:
                self.exceeded = exceeded
                self._kill()
                self.supervisor.close()

    def _call(self, source: bytes) -> Response:
        begin, supervisor = time.monotonic(), self.supervisor
        if self.calls_fd < 0:
            self._start()
        supervisor.usage.peak = 0
        with Suppress(BlockingIOError):  # drop what the interpreter reported between calls
            while os.read(supervisor.done_fd, 4096):
                pass
        text = struct.pack(">I", len(source)) + source if self.kind == "python" else source + b"\0"
        event, self.exceeded = self.exceeded, ""
        if not event:
            supervisor.streams.feed(self.calls_fd, text, keep_open=True)
            event = supervisor.watch(self.cpu_before_s)
        if event != "done":
            self._kill()
        stdout, stderr = supervisor.streams.drain()
        cpu_before_s, self.cpu_before_s = self.cpu_before_s, supervisor.usage.sample(1 << 62)[1] + reaped_cpu_s()
        header = _outcome(supervisor, event, begin, self.cpu_before_s - cpu_before_s)
        if event == "done":
            header["exit"] = supervisor.call_status
        else:
            supervisor.close()
        return {**header, "names": []}, [stdout, stderr]


_NAMESPACES = 0x10000000 | 0x20000000 | 0x20000 | 0x08000000
"""CLONE_NEWUSER, NEWPID, NEWNS, NEWIPC: new for each run. A zygote serves one run at a time without network."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_DROP_BOUNDING, _NO_NEW_PRIVILEGES = 24, 38
_MNT_DETACH = 2
_PRELOAD_DELAY_S = 0.05  # delay of the preloading, so that it does not delay a first run that is already requested


def run_zygote(fd: int) -> None:
    """Serve the host until it closes the control socket `fd`."""
    control = _socket.socket(fileno=fd)
    header, (seccomp,) = Connection(fd, fd).receive()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path.extend(string_list(header["paths"]))
    for step in ("setquit", "setcopyright", "sethelper"):
        __import__("site").__dict__[step]()
    _fork_supervisor(control, seccomp)
    select.select([control], [], [], _PRELOAD_DELAY_S)
    for name in string_list(header["preload"]):  # imported in advance, so that forked programs share them
        with Suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.disable()
    gc.freeze()
    while control.recv(1):
        _fork_supervisor(control, seccomp)


def _fork_supervisor(control: _socket.socket, seccomp: bytes) -> None:
    ours, theirs = _socket.socketpair()
    connection, user = Connection(ours.fileno(), ours.fileno()), (os.getuid(), os.getgid())
    pid = LIBC.syscall(_CLONE[os.uname().machine], ctypes.c_ulong(_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        control.close()
        theirs.close()
        serve_request(connection, seccomp, lambda: _set_up_namespaces(*user))
        os._exit(0)
    if pid == -1:
        connection.send({"error": f"clone: {os.strerror(ctypes.get_errno())}"}, [])
    control.sendmsg([b"g"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", theirs.fileno()))])
    theirs.close()
    ours.close()


def _set_up_namespaces(uid: int, gid: int) -> None:
    """Reset signals, map the user, mount /proc and one small writable file system, and give up privileges."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets only signals with a handler, as Python sets here
    write_text("/proc/self/setgroups", "deny")
    write_text("/proc/self/uid_map", f"{uid} {uid} 1")
    write_text("/proc/self/gid_map", f"{gid} {gid} 1")
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    mount("tmpfs", "/store", "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=64,mode=700")
    for name, target in (("box", "/box"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/store/{name}", 0o700)
        mount(f"/store/{name}", target, None, BIND)
    check_result(LIBC.umount2(b"/store", _MNT_DETACH), "umount /store")
    set_dumpable(0)
    check_result(LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    for capability in range(64):
        if LIBC.prctl(_DROP_BOUNDING, capability, 0, 0, 0) == -1:
            break


def run_container(fd: int) -> None:
    """Serve one run or one session; `fd` is stdin. The container engine limits the size of /box."""
    source, sink = os.dup(fd), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, fd)
    os.dup2(null, 1)
    sys.path[:] = [path for path in sys.path if path]  # the box is the working folder
    connection = Connection(source, sink)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Suppress(Disconnected):
        _, (seccomp,) = connection.receive()
        serve_request(connection, seccomp, lambda: set_dumpable(0), in_container=True)
