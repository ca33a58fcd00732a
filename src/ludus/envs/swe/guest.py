"""The program that runs tests inside the sandbox. It imports nothing of Ludus: its text is sent there.

A parent, into which no code of the policy ever comes, forks one child for each run of tests; the child loads
the tests and what they import. The child tells what became of each test through a pipe, each line with a key
of its run. The parent takes no order from it: it kills all that the child left behind, looks whether the
tests are still what they were, and only then reads the nonce of the host, by which the host knows its words.
"""

from __future__ import annotations

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
from collections.abc import Generator, Iterator
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


class Run(TypedDict):
    """One run of tests: where, which, and what to tell of them. No `tests`: all of the `files`."""

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


class Done(TypedDict):
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

    def tell(self, *words: object) -> None:
        text = memoryview((json.dumps([self.key, *words]) + "\n").encode())
        while text:
            text = text[os.write(self.fd, text) :]

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
        """Note which functions under the folder run while a test does."""
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
    pytest.main([*words, *run["files"]], plugins=[make_plugin(fd, run)])


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


def carry_out(run: Run, first: dict[str, str], finished: tuple[str, ...]) -> Done:
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
