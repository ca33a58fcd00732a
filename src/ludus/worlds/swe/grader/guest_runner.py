"""The program that runs tests inside the sandbox. It imports nothing of Ludus: its text is sent there.

A parent, into which no code of the policy ever comes, forks one child for each run of tests; the child loads
the tests and what they import. The child writes what became of each test to a pipe, each line with a key
of its run. The parent takes no order from it: it kills all that the child left behind, checks that the
tests are still what they were, and only then reads the nonce of the host, by which the host knows its words.

Masked tests (`ludus.worlds.swe.grader.masking`) call a probe with the values that they computed; the child
sends a digest of each and has nothing to compare it with. An audit hook ends a child in which code of the
repository reaches for frames, the garbage collector, code objects, test files, raw memory or other processes,
except where the code of the reference run did the same.
"""

from __future__ import annotations

import _thread
import builtins
import ctypes
import hashlib
import importlib
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import pytest

TOP = "/box"
READY = "ready\n"
"""The parent's first words, before any child: what ends it from here on is the policy's doing."""
_SET_DUMPABLE = 4
_CHUNK = 1 << 16
_MOST_BYTES = 1 << 25
_DEEPEST = 60
_WATCHED = frozenset(
    [
        *("sys._getframe", "sys._getframemodulename", "sys._current_frames", "sys._current_exceptions"),
        *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "sys.addaudithook"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
        *("object.__getattr__", "object.__setattr__", "code.__new__", "function.__new__", "marshal.loads"),
        *("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "subprocess.Popen"),
        *("os.kill", "os.link", "os.symlink", "os.rename", "shutil.copyfile", "pty.spawn"),
        *("ctypes.dlopen", "ctypes.dlsym", "ctypes.cdata", "ctypes.call_function", "ctypes.addressof"),
        *("import", "open", "compile", "cpython.PyInterpreterState_New", "mmap.__new__"),
    ]
)
"""Audit events (PEP 578) that a repair has no need of."""
_MODULES = frozenset({"_ctypes", "ctypes", "_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi"})
_ATTRIBUTES = frozenset({"__code__", "f_code", "tb_frame", "gi_frame", "cr_frame", "ag_frame", "gi_code", "cr_code"})
_HARMLESS = (
    *("collections/__init__.py:namedtuple", "typing.py:_caller", "inspect.py:_signature_from_function"),
    *("inspect.py:_has_code_flag", "logging/__init__.py:<lambda>", "logging/__init__.py:currentframe"),
)
"""Functions of the standard library that reach for frames and code and do not hand them on."""
_PYTEST = ("_pytest/", "pytest/", "pluggy/", "iniconfig/", "packaging/", "pygments/")
"""How the files of the archive are called in its byte code."""


class Run(TypedDict):
    """One run of tests: where, which, and what to report of them. No `tests`: all of the `files`.

    `probe` is the name that masked tests call. `allowed` are the reaches that do not end the child; None:
    none does, and each is reported.
    """

    key: str
    folder: str
    paths: list[str]
    ini: str
    files: list[str]
    tests: list[str]
    frozen: list[str]
    seconds: float
    texts: bool
    trace: bool
    probe: str
    allowed: list[str] | None


class RunEnded(TypedDict):
    """What came of a run: the lines of its child, and the frozen files that are not what they were."""

    lines: str
    changed: list[str]


class Recorder:
    """A plugin that writes one line a phase of a test: key, test, phase, outcome and what was said."""

    def __init__(self, fd: int, run: Run) -> None:
        self.fd, self.key, self.texts = fd, run["key"], run["texts"]
        self.wanted = frozenset(run["tests"])
        self.root = run["folder"] + "/"
        self.trace: dict[str, set[tuple[str, int]]] | None = {} if run["trace"] else None
        self.test = ""

    def tell(self, *words: object) -> None:
        text = memoryview((json.dumps([self.key, *words]) + "\n").encode())
        while text:
            text = text[os.write(self.fd, text) :]

    def probe(self, number: int, value: object) -> None:
        """Report a value that a masked test computed."""
        self.tell("value", self.test, number, digest_of(value))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.wanted:
            chosen = [item for item in items if item.nodeid.split("[")[0] in self.wanted]
            config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
            items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "expected" if report.__dict__.get("wasxfail") is not None else report.outcome
        said = dict(report.user_properties).get("ludus", {}) if self.texts else {}
        part = type(report).__name__ == "SubtestReport"
        if outcome == "passed" and (part or report.when != "call"):
            return
        self.tell("phase", report.nodeid, report.when, outcome, round(report.duration, 4), said)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("broken", report.nodeid, str(report.longrepr)[-500:] if self.texts else "")

    def pytest_sessionfinish(self) -> None:
        for test, calls in (self.trace or {}).items():
            self.tell("calls", test, sorted(calls))
        self.tell("end")

    @contextmanager
    def watching(self, nodeid: str) -> Iterator[None]:
        """Note which test runs, and which functions under the folder run while it does."""
        self.test = nodeid.split("[")[0]
        if self.trace is None:
            yield
            return
        calls = self.trace.setdefault(nodeid.split("[")[0], set())
        root, seen = self.root, set()

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code not in seen:
                seen.add(code)
                if code.co_filename.startswith(root):
                    calls.add((code.co_filename[len(root) :], code.co_firstlineno))

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)


class Opaque(ValueError):
    """A value that is not plain, such as an object of a class of the repository."""


def digest_of(value: object) -> str:
    """A digest that is the same for plain values that are equal; empty for other values."""
    try:
        return hashlib.sha256(canonical(value).encode()).hexdigest()[:32]
    except (Opaque, TypeError):
        return ""


def canonical(value: object, depth: int = 0) -> str:
    """A plain value as text, by the methods of the built-in types alone. Raises Opaque and TypeError."""
    if depth > _DEEPEST:
        raise Opaque
    if value is None:
        return "None"
    if isinstance(value, int):
        return f"n{int.__index__(value):x}"
    if isinstance(value, float):
        number = float.__add__(value, 0.0)
        return f"n{int(number):x}" if number.is_integer() else f"f{number!r}"
    if isinstance(value, str):
        return json.dumps(str.__str__(value))
    if isinstance(value, bytes):
        return f"b{bytes.hex(value)}"
    if isinstance(value, bytearray):
        return f"b{bytearray.hex(value)}"
    return canonical_many(value, depth + 1)


def canonical_many(value: object, depth: int) -> str:
    """A plain container as text. Raises Opaque and TypeError."""
    if isinstance(value, dict):
        pairs = [f"{canonical(key, depth)}:{canonical(one, depth)}" for key, one in dict.items(value)]
        return f"{{{','.join(sorted(pairs))}}}"
    if isinstance(value, list):
        return f"l[{','.join(canonical(one, depth) for one in list.__iter__(value))}]"
    if isinstance(value, tuple):
        return f"t[{','.join(canonical(one, depth) for one in tuple.__iter__(value))}]"
    if isinstance(value, set):
        return f"s[{','.join(sorted(canonical(one, depth) for one in set.__iter__(value)))}]"
    if isinstance(value, frozenset):
        return f"s[{','.join(sorted(canonical(one, depth) for one in frozenset.__iter__(value)))}]"
    raise Opaque


def make_details(tests: frozenset[str], trusted: tuple[str, ...]) -> Callable[[str, tuple[object, ...]], str | None]:
    """A function that names what an audit event reaches for; None where that is nothing to report."""
    names = frozenset(os.path.basename(path) for path in tests)
    modules, attributes = _MODULES, _ATTRIBUTES

    def detail_of(event: str, given: tuple[object, ...]) -> str | None:
        texts = [str.__str__(one) for one in given if isinstance(one, str)]
        texts += [bytes.decode(one, "utf-8", "replace") for one in given if isinstance(one, bytes)]
        first = texts[0] if texts else ""
        if event == "import":
            return first if first in modules else None
        if event == "open":
            return "a file of tests" if first.rpartition("/")[2] in names else first if "/proc" in first else None
        if event == "compile":
            taken = any(one.startswith(trusted) or one in tests for one in texts)
            return "a name of another file" if taken else None
        if event.startswith("object."):
            return first if first in attributes else None
        return ""

    return detail_of


def make_watch(recorder: Recorder, run: Run, bottom: FrameType) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook that reports reaches of the repository's code and ends the process unless allowed."""
    tests = frozenset(f"{run['folder']}/{path}" for path in run["frozen"])
    trusted = (*_PYTEST, f"{os.path.dirname(os.__file__)}/", "<frozen ")
    watched, harmless, detail_of = _WATCHED, _HARMLESS, make_details(tests, trusted)
    busy, seen = set[int](), set[str]()
    allowed = None if run["allowed"] is None else frozenset(run["allowed"])
    tell, leave, frame_at, ident = recorder.tell, os._exit, sys._getframe, _thread.get_ident

    def caller_of() -> str | None:
        """Which function reaches, where code of the repository stands between it and the test; else None."""
        frame, caller = frame_at(1).f_back, ""
        while frame is not None and frame is not bottom:
            code = frame.f_code
            if code.co_filename in tests:
                return None
            own = not code.co_filename.startswith(trusted)
            caller = caller or ("the code" if own else f"{code.co_filename}:{code.co_name}")
            if own:
                return caller
            frame = frame.f_back
        return None

    def watch(event: str, given: tuple[object, ...]) -> None:
        if event not in watched or ident() in busy:
            return
        busy.add(ident())
        try:
            detail = detail_of(event, given)
            caller = None if detail is None else caller_of()
            if caller is None or caller.endswith(harmless):
                return
            if caller.startswith("<frozen importlib") and event in ("compile", "marshal.loads"):
                return
            reach = f"{event} {detail} by {caller}".replace("  ", " ")
            if reach not in seen and (allowed is None or reach not in allowed):
                seen.add(reach)
                tell("reach", reach)
                if allowed is not None:
                    leave(1)
        finally:
            busy.discard(ident())

    return watch


def said_of(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> dict[str, str]:
    """The statement of the test that failed, and the error as it is called."""
    statement = ""
    for entry in error.traceback:
        if str(entry.path) == str(item.path):
            statement = " ".join(str(entry.statement).split())
    return {"statement": statement[:400], "error": f"{error.typename}: {error.value}"[:1200]}


def make_plugin(fd: int, run: Run) -> Recorder:
    """A recorder with the hooks that need pytest's marks."""
    import pytest

    class Watching(Recorder):
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
            with self.watching(item.nodeid):
                return (yield)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(
            self, item: pytest.Item, call: pytest.CallInfo[None]
        ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
            report = yield
            if self.texts and call.excinfo is not None:
                report.user_properties.append(("ludus", said_of(item, call.excinfo)))
            return report

    return Watching(fd, run)


def be_child(run: Run, fd: int) -> None:
    """Run the tests of one folder in this fork."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    hear(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    os.chdir(run["folder"])
    sys.path[:] = [*run["paths"], *(place for place in sys.path if place not in ("/box", ""))]
    import pytest

    words = ["-q", "-p", "no:cacheprovider", "--tb=no", "--continue-on-collection-errors", "-W", "ignore"]
    words += ["-o", "addopts=", "-c", run["ini"], "--rootdir", run["folder"], "--confcutdir", run["folder"]]
    recorder = make_plugin(fd, run)
    if run["probe"]:
        builtins.__dict__[run["probe"]] = recorder.probe
    sys.addaudithook(make_watch(recorder, run, sys._getframe()))
    pytest.main([*words, *run["files"]], plugins=[recorder])


def hear(handler: signal.Handlers) -> None:
    """Set what all signals do that can be caught; those of ended children stay as they are."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, handler)


def digests(top: str) -> dict[str, str]:
    """What the regular files under a folder hold, by their path."""
    found = {}
    for folder, _, names in os.walk(top):
        for path in (os.path.join(folder, name) for name in names):
            with suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    with open(path, "rb") as file:
                        found[path] = hashlib.sha256(file.read()).hexdigest()
    return found


def differing(first: dict[str, str], now: dict[str, str]) -> list[str]:
    """The files that are new, gone, or hold something else."""
    return [path for path in sorted(first.keys() | now.keys()) if first.get(path) != now.get(path)]


def carry_out(run: Run, first: dict[str, str], finished: tuple[str, ...]) -> RunEnded:
    """One run: a child, its lines, and which files are not what they were.

    `first` is what all files held before any child ran. Nothing runs where a child before this one has
    changed files outside its own folder.
    """
    apart = tuple(f"{folder}/" for folder in finished)
    touched = [path for path in differing(first, digests(TOP)) if not path.startswith(apart)]
    if touched:
        return {"lines": "", "changed": touched}
    frozen = {os.path.join(run["folder"], path) for path in run["frozen"]}
    for path in frozen:
        os.chmod(path, 0o444)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            be_child(run, write)
        finally:
            os._exit(0)
    os.close(write)
    lines = listen(read, child, run["seconds"])
    changed = differing(first, digests(TOP))
    return {"lines": lines, "changed": [path for path in changed if path in frozen]}


def listen(fd: int, child: int, seconds: float) -> str:
    """What the child writes until it ends or its time is over. Nothing of it runs after that."""
    os.set_blocking(fd, False)
    parts: list[bytes] = []
    deadline, ended, held = time.monotonic() + seconds, False, 0
    while not ended and time.monotonic() < deadline and held < _MOST_BYTES:
        ready = select.select([fd], [], [], 0.05)[0]
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
        held += drain(fd, parts) if ready or ended else 0
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while not ended:
        ended = os.waitpid(child, 0)[0] == child
    os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")


def drain(fd: int, parts: list[bytes]) -> int:
    """Take what the pipe holds; how much that was."""
    before = len(parts)
    with suppress(BlockingIOError):
        while part := os.read(fd, _CHUNK):
            parts.append(part)
    return sum(map(len, parts[before:]))


def main() -> None:
    """Read the order, say that pytest is there, do the runs, then read the nonce and report."""
    hear(signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with open("/box/order.json", encoding="utf-8") as file:
        order = json.load(file)
    os.remove("/box/order.json")
    sys.path.insert(0, order["archive"])
    importlib.import_module("pytest")  # each child finds it imported, from the archive and nowhere else
    sys.stdout.write(READY)
    sys.stdout.flush()
    first, found = digests(TOP), []
    finished: tuple[str, ...] = ()
    for run in order["runs"]:
        found.append(carry_out(run, first, finished))
        finished = (*finished, run["folder"])
    nonce = sys.stdin.readline().strip()
    sys.stdout.write(nonce + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
