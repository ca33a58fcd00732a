"""Orders of a guard: one run, or a session of several calls."""

from __future__ import annotations

import os
import select
import struct
import time

from ludus.sandbox.guest.files import collect, make_box, mark, put, remove, wipe
from ludus.sandbox.guest.guard import Guard
from ludus.sandbox.guest.kernel import ResourceBounds
from ludus.sandbox.guest.light import Suppress
from ludus.sandbox.guest.listing import ListedFile
from ludus.sandbox.guest.program import SHELL, run_command, run_python, serve_python
from ludus.sandbox.guest.usage import reaped_cpu
from ludus.sandbox.guest.wire import Gone, WireLine

_IDLE_S = 0.1


class ProcessEnded:
    """Result of a program or call, as sent to the host."""

    def __init__(self, guard: Guard, how: str, begin: float, cpu_s: float) -> None:
        status = guard.status
        signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        self.header: dict[str, object] = {
            "exit": os.WEXITSTATUS(status) if status is not None and signal is None else None,
            "signal": signal,
            "timed_out": how == "time" or signal == 24,
            "memory_exceeded": how == "memory",
            "truncated": guard.left_out > 0,
            "left_out": guard.left_out,
            "cpu_s": round(max(0.0, cpu_s), 6),
            "wall_s": round(time.monotonic() - begin, 6),
            "peak": guard.usage.peak,
        }


def run_once(
    line: WireLine, code: bytes, bounds: ResourceBounds, header: dict[str, object], blobs: list[bytes]
) -> None:
    """Run a program; the response carries stdout, stderr and files. Raises Gone.

    Errors after the program's start are blamed on the program.
    """
    guard, begin = Guard(line, code, bounds), time.monotonic()
    names, argv = list(map(str, _list(header["names"]))), list(map(str, _list(header["argv"])))
    stdin, source, *contents = blobs
    files = dict(zip(names, contents, strict=True))
    put(files, set())
    if argv:
        guard.start(lambda: run_command(argv), stdin)
    else:
        guard.start(lambda: run_python(source.decode("utf-8", "surrogatepass")), stdin)
    with _Telling(line):
        try:
            how = guard.watch(0.0)
        finally:
            guard.end_all()
        stdout, stderr = guard.drain()
        ended = ProcessEnded(guard, how, begin, reaped_cpu())
        if not argv and ended.header["exit"] == 1 and b"MemoryError" in stderr[-200:]:
            ended.header["memory_exceeded"] = True
        made = collect(bounds, files)
        ended.header["truncated"] = guard.left_out > 0 or made.cut or made.left_out > 0
        line.send({**ended.header, "names": list(made.files)}, [stdout, stderr, *made.files.values()])


class _Telling:
    """Reports errors while a program runs as caused by the program; Gone passes through."""

    def __init__(self, line: WireLine) -> None:
        self._line = line

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, Gone):
            return False
        self._line.send({"broken": f"{type(error).__name__}: {error}"}, [])
        return True


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("a list was expected")
    return value


class SessionGuard:
    """A session: an interpreter that is restarted if a call ended it."""

    def __init__(self, line: WireLine, code: bytes, bounds: ResourceBounds, kind: object) -> None:
        self.line, self.kind, self.bounds = line, kind, bounds
        self.guard = Guard(line, code, bounds)
        self.commands = -1
        self.spent = 0.0
        self.overrun = ""

    def serve(self) -> None:
        """Serve the host until it disconnects. Raises Gone."""
        poll = select.poll()
        poll.register(self.line.sock.fileno(), select.POLLIN)
        self._begin()
        while True:
            if not poll.poll(_IDLE_S * 1000):
                self._look()
                continue
            header, blobs = self.line.read()
            try:
                self._answer(header, blobs)
            except OSError as error:
                self.line.send({"error": str(error)}, [])

    def _answer(self, header: dict[str, object], blobs: list[bytes]) -> None:
        names = list(map(str, _list(header.get("names", []))))
        executable = set(map(str, _list(header.get("executable", []))))
        if header["op"] == "call":
            with _Telling(self.line):
                self._call(blobs[0])
            return
        if header["op"] == "restore":
            wipe(4 * self.bounds.disk_files)
            put(dict(zip(names, blobs, strict=True)), executable)
            self.line.send({}, [])
        elif header["op"] == "change":
            modes = header["modes"]
            put(dict(zip(names, blobs, strict=True)), set())
            mark(modes if isinstance(modes, dict) else {})
            remove(list(map(str, _list(header["remove"]))))
            self.line.send({}, [])
        elif header["op"] == "snapshot":
            made = collect(self.bounds, {})
            told = {"executable": sorted(made.executable), "cut": made.cut, "left_out": made.left_out}
            self.line.send({"names": list(made.files), **told}, [*made.files.values()])
        elif header["op"] == "processes":
            listed = ListedFile()
            self.line.send({"processes": listed.found, "cut": listed.cut}, [])
        else:
            raise OSError(f"there is no operation {header['op']!r}")

    def _begin(self) -> None:
        """Start the interpreter."""
        (commands_r, self.commands), (done_r, done_w) = os.pipe(), os.pipe()
        if self.kind == "python":
            self.guard.start(serve_python, b"", (commands_r, done_w))
        else:
            self.guard.start(
                lambda: run_command(["bash", "--norc", "--noprofile", "-c", SHELL]), b"", (commands_r, done_w)
            )
        os.set_blocking(done_r, False)
        self.guard.done = done_r
        self.guard.poll.register(done_r, select.POLLIN)

    def _end(self) -> None:
        """End all processes; the next call starts a new interpreter."""
        self.guard.end_all()
        os.close(self.commands)
        self.commands = -1

    def _look(self) -> None:
        """Check the limits of background processes between calls."""
        if self.commands >= 0:
            over = self.guard.excess(self.spent)
            if over or self.guard.status is not None:
                self.overrun = over
                self._end()
                self.guard.close()

    def _call(self, source: bytes) -> None:
        begin = time.monotonic()
        if self.commands < 0:
            self._begin()
        guard = self.guard
        guard.usage.peak = 0
        _clear(guard.done)
        how, self.overrun = self.overrun or self._ask(source), ""
        if how != "done":
            self._end()
        stdout, stderr = guard.drain()
        before, self.spent = self.spent, guard.cpu()
        header = ProcessEnded(guard, how, begin, self.spent - before).header
        if how == "done":
            header["exit"] = guard.said
        else:
            guard.close()
        self.line.send({**header, "names": []}, [stdout, stderr])

    def _ask(self, source: bytes) -> str:
        text = struct.pack(">I", len(source)) + source if self.kind == "python" else source + b"\0"
        return self.guard.tell(self.commands, text, self.spent)


def _clear(fd: int) -> None:
    """Drop what the interpreter reported between calls."""
    with Suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def answer(line: WireLine, code: bytes, contained: bool = False) -> None:
    """Serve one order; failures of the guard itself are reported to the host.

    In a container (`contained`) the engine sets the size of the box and the process limit, since the kernel
    would count the user's processes in all containers.
    """
    try:
        header, blobs = line.read()
        bounds = ResourceBounds(header["limits"])
        if contained:
            bounds.processes = 0
        else:
            make_box(bounds)
        if header["op"] == "run":
            run_once(line, code, bounds, header, blobs)
        else:
            names = list(map(str, _list(header["names"])))
            session = SessionGuard(line, code, bounds, header["kind"])
            put(dict(zip(names, blobs, strict=True)), set())
            line.send({}, [])
            session.serve()
    except Gone:
        return
    except Exception as error:  # boundary: report to the host why there is no outcome
        line.send({"error": f"{type(error).__name__}: {error}"}, [])
