"""The program that runs tests inside the sandbox. Its source is sent to the sandbox, so it imports nothing from Ludus.

A parent process, which never imports code of the policy, forks a child, which imports the tests and the code under test
and writes the results to a pipe, each line with the key of the run. The parent kills every process that the child left,
checks that the test files are unchanged, and only then reads the nonce by which the host recognises its report.

Masked tests (`ludus.worlds.swe.masking`) call a probe with the values that they computed; the child sends digests.
An audit hook ends a child if code of the repository accesses frames, the garbage collector, code objects, test files,
raw memory or other processes, unless the reference run did the same.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import pytest

TOP = "/box"
ARCHIVE = "pytest.zip"
READY = "ready\n"
"""The first output of the parent, before any child: a later failure is caused by the policy's code."""
_SET_DUMPABLE = 4
_MAX_BYTES = 1 << 25
_MAX_DEPTH = 120
_SCALARS: tuple[tuple[type, Callable[..., str]], ...] = (
    (type(None), lambda value: "None"),
    (int, lambda value: f"n{int.__index__(value):x}"),
    (float, lambda value: f"n{float.__int__(value):x}" if float.is_integer(value) else f"f{float.__repr__(value)}"),
    (str, lambda value: json.dumps(str.__str__(value))),
    (bytes, lambda value: f"b{bytes.hex(value)}"),
    (bytearray, lambda value: f"b{bytearray.hex(value)}"),
)
_CONTAINERS: tuple[tuple[type, str, Callable[..., Iterable[object]], Callable[[Iterable[str]], list[str]]], ...] = (
    *((list, "l", list.__iter__, list), (tuple, "t", tuple.__iter__, list), (dict, "d", dict.items, sorted)),
    *((set, "s", set.__iter__, sorted), (frozenset, "s", frozenset.__iter__, sorted)),
)


class TrialRequest(TypedDict):
    """A trial of tests. An empty `tests` selects all tests of the `files`; `probe` is the name that masked tests call.

    `watched` are the tables of `data/watched.toml`. `allowed` are the reaches that do not end the child; with None no
    reach ends it, and all are reported.
    """

    key: str
    folder: str
    paths: list[str]
    files: list[str]
    tests: list[str]
    frozen: list[str]
    seconds: float
    probe: str
    watched: dict[str, list[str]]
    allowed: list[str] | None


class Recorder:
    """pytest plugin that writes one line per phase of a test: key, kind, test, phase, outcome, duration in seconds."""

    def __init__(self, fd: int, run: TrialRequest) -> None:
        self.fd, self.key = fd, run["key"]
        self.wanted, self.test = frozenset(run["tests"]), ""

    def tell(self, *words: object) -> None:
        text = memoryview((json.dumps([self.key, *words]) + "\n").encode())
        while text:
            text = text[os.write(self.fd, text) :]

    def probe(self, number: int, value: object) -> None:
        """Report the value that a masked test computed."""
        self.tell("value", self.test, number, digest_of(value))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.wanted:
            chosen = [item for item in items if item.nodeid.split("[")[0] in self.wanted]
            config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
            items[:] = chosen

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid.split("[")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "expected" if report.__dict__.get("wasxfail") is not None else report.outcome
        part = type(report).__name__ == "SubtestReport"
        if outcome != "passed" or (report.when == "call" and not part):
            self.tell("phase", report.nodeid, report.when, outcome, round(report.duration, 4), {})

    def pytest_sessionfinish(self) -> None:
        self.tell("end")


def digest_of(value: object) -> str:
    """Return a digest that is equal for equal values of built-in types; empty for other values."""
    try:
        return hashlib.sha256(canonical(value).encode()).hexdigest()[:32]
    except (ValueError, TypeError):
        return ""


def canonical(value: object, depth: int = 0) -> str:
    """Return a value as text, using methods of built-in types only. Raises ValueError or TypeError for other types."""
    if depth > _MAX_DEPTH:
        raise ValueError
    for kind, text_of in _SCALARS:
        if isinstance(value, kind):
            return text_of(value)
    for kind, letter, each, order in _CONTAINERS:
        if isinstance(value, kind):
            return f"{letter}[{','.join(order(canonical(one, depth + 1) for one in each(value)))}]"
    raise ValueError


def make_details(
    run: TrialRequest, tests: frozenset[str], trusted: tuple[str, ...]
) -> Callable[[str, tuple[object, ...]], str | None]:
    """Return a function that names the object of an audit event, or returns None if the event is not reported."""
    names = frozenset(os.path.basename(path) for path in tests)
    modules, attributes = frozenset(run["watched"]["modules"]), frozenset(run["watched"]["attributes"])

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


def make_watch(recorder: Recorder, run: TrialRequest, bottom: FrameType) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that reports reaches of the repository's code and ends the process unless allowed."""
    tests = frozenset(f"{run['folder']}/{path}" for path in run["frozen"])
    trusted = (*run["watched"]["archive"], f"{os.path.dirname(os.__file__)}/", "<frozen ")
    watched, harmless = frozenset(run["watched"]["events"]), tuple(run["watched"]["harmless"])
    detail_of = make_details(run, tests, trusted)
    busy, seen = set[int](), set[str]()
    allowed = None if run["allowed"] is None else frozenset(run["allowed"])
    tell, leave, frame_at, ident = recorder.tell, os._exit, sys._getframe, _thread.get_ident

    def caller_of() -> str | None:
        """Return the calling function if code of the repository is between it and the test, else None."""
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
            imports = event in ("compile", "marshal.loads") and (caller or "").startswith("<frozen importlib")
            if caller is None or imports or caller.endswith(harmless):
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


def be_child(run: TrialRequest, fd: int) -> None:
    """Run the tests of one folder in this fork."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    set_signals(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    os.chdir(run["folder"])
    sys.path[:] = [*run["paths"], *(place for place in sys.path if place not in (TOP, ""))]
    import pytest

    words = ["-q", "-p", "no:cacheprovider", "--tb=no", "--continue-on-collection-errors", "-W", "ignore"]
    words += ["-o", "addopts=", "-c", f"{TOP}/pytest.ini", "--rootdir", run["folder"], "--confcutdir", run["folder"]]
    recorder = Recorder(fd, run)
    if run["probe"]:
        builtins.__dict__[run["probe"]] = recorder.probe
    sys.addaudithook(make_watch(recorder, run, sys._getframe()))
    pytest.main([*words, *run["files"]], plugins=[recorder])


def set_signals(handler: signal.Handlers) -> None:
    """Set the handler of all signals that can be caught except SIGCHLD."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, handler)


def digests(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each path; empty if it is not a regular file."""
    found = dict.fromkeys(paths, "")
    for path in found:
        with suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as file:
                    found[path] = hashlib.sha256(file.read()).hexdigest()
    return found


def carry_out(run: TrialRequest) -> str:
    """Run the child and return its output until it ends or times out; kill all processes that it leaves."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            be_child(run, write)
        finally:
            os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    text, deadline, ended = bytearray(), time.monotonic() + run["seconds"], False
    while not ended and time.monotonic() < deadline and len(text) < _MAX_BYTES:
        ready = select.select([read], [], [], 0.05)[0]
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
        with suppress(BlockingIOError):
            while (ready or ended) and (part := os.read(read, 1 << 16)):
                text += part
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while not ended:
        ended = os.waitpid(child, 0)[0] == child
    return text.decode("utf-8", "replace")


def main() -> None:
    """Read the request, report that pytest is importable, run the tests, then read the nonce and report."""
    set_signals(signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with open(f"{TOP}/order.json", encoding="utf-8") as file:
        run: TrialRequest = json.load(file)
    os.remove(f"{TOP}/order.json")
    sys.path.insert(0, f"{TOP}/{ARCHIVE}")
    importlib.import_module("pytest")  # import before the fork, so that the child uses pytest from the archive
    sys.stdout.write(READY)
    sys.stdout.flush()
    before = digests(f"{run['folder']}/{path}" for path in run["frozen"])
    for path in before:
        os.chmod(path, 0o444)
    lines = carry_out(run)
    changed = [path for path, digest in digests(before).items() if digest != before[path]]
    nonce = sys.stdin.readline().strip()
    sys.stdout.write(nonce + json.dumps([lines, changed]) + "\n")


if __name__ == "__main__":
    main()
