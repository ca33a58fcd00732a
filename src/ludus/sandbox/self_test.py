"""Self-test of a sandbox backend by small programs.

`python_inside` checks that the backend runs at all. `findings` tests the behaviour that worlds and graders
rely on. Neither can test isolation, which depends on the backend's construction.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ludus.errors import LudusError, UserError
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.sandbox.factory import SERVICES

_LATE_S = 10.0
"""A program that runs this much longer than its 1 s limit was not stopped by the clock."""
_LARGE_MIB, _ROOM_MIB = 512, 256

_VERSION = "import platform; print(platform.python_version())"
_NETWORK = """
try:
    lines = open('/proc/net/dev').read().splitlines()[2:]
    print(*sorted(line.split(':')[0].strip() for line in lines))
except OSError:
    print('?')
"""
_LEAVE = "for place in ('/tmp', '.'): open(f'{place}/NAME', 'w').write('left')"
_FIND = """
import os
for place in ('/tmp', '.'):
    if os.path.exists(f'{place}/NAME'):
        print(place)
        os.remove(f'{place}/NAME')
"""


@dataclass(frozen=True, slots=True)
class SelfTestFinding:
    """A test and its result; `wrong` if worlds and graders rely on a different one."""

    what: str
    found: str
    wrong: bool = False


async def python_inside(sandbox: Sandbox) -> str:
    """Return the Python version inside. Raises UserError if the program fails, WorldError if the backend
    does."""
    outcome = await sandbox.run(_VERSION)
    if not outcome.ok:
        raise UserError(f"The {sandbox.name} backend ran a test program, which failed: {outcome.error_text[-300:]}")
    return outcome.text.strip()


async def findings(sandbox: Sandbox) -> list[SelfTestFinding]:
    """Run all tests and return one finding each."""
    tried: dict[str, Callable[[Sandbox], Awaitable[SelfTestFinding]]] = {
        "files and standard input": _input,
        "commands": _command,
        "exit codes": _exit,
        "the clock": _clock,
        "memory": _memory,
        "files that come back": _files,
        "sessions": _sessions,
        "network": _network,
        "runs apart from each other": _apart,
    }
    found = []
    for what, attempt in tried.items():
        try:
            one = await attempt(sandbox)
            found.append(SelfTestFinding(what, one.found, one.wrong))
        except LudusError as error:
            found.append(SelfTestFinding(what, str(error), wrong=True))
    return found


def not_judged(backend: str) -> str:
    """Return a sentence on what cannot be tested about a backend."""
    if backend in SERVICES:
        return (
            "whether the service isolates its machine, its network and other users' runs; whether it "
            "limits CPU seconds, processes, open files and disk, which are not requested; its load capacity"
        )
    if backend == "remote":
        return "the isolation of the backend behind the server: see docs/use/sandbox.md"
    return "its isolation, which depends on its construction: see docs/use/sandbox.md"


async def _input(sandbox: Sandbox) -> SelfTestFinding:
    program = "import sys; print(open('given.txt').read() + sys.stdin.read(), end='')"
    outcome = await sandbox.run(program, files={"given.txt": b"one "}, stdin=b"two")
    right = outcome.text == "one two"
    return SelfTestFinding(
        "", "reach the program" if right else f"do not reach it: it read {outcome.text!r}", not right
    )


async def _command(sandbox: Sandbox) -> SelfTestFinding:
    outcome = await sandbox.run(["echo", "a  b", "$HOME"])
    right = outcome.text == "a  b $HOME\n"
    return SelfTestFinding(
        "", "run with exact arguments" if right else f"fail: echo printed {outcome.text!r}", not right
    )


async def _exit(sandbox: Sandbox) -> SelfTestFinding:
    left, struck = (
        await sandbox.run("import sys; sys.exit(5)"),
        await sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    )
    right = left.exit == 5 and not struck.ok
    return SelfTestFinding(
        "", "are reported" if right else f"are wrong: 5 is {left.exit}, a crash is {struck.exit}", not right
    )


async def _clock(sandbox: Sandbox) -> SelfTestFinding:
    begin = time.perf_counter()
    outcome = await sandbox.run("while True: pass", limits=Limits(wall_s=1.0))
    took_s = time.perf_counter() - begin
    right = outcome.timed_out and took_s < 1.0 + _LATE_S
    said = f"stops a program with a limit of 1 s after {took_s:.1f} s"
    return SelfTestFinding(
        "", said if right else f"fails: a program with a limit of 1 s took {took_s:.1f} s", not right
    )


async def _memory(sandbox: Sandbox) -> SelfTestFinding:
    program = f"held = b'x' * ({_LARGE_MIB} << 20); print(len(held))"
    outcome = await sandbox.run(program, limits=Limits(memory_bytes=_ROOM_MIB * MIB))
    held = f"{_LARGE_MIB} MiB with a limit of {_ROOM_MIB}"
    return SelfTestFinding(
        "", f"programs cannot hold {held}" if not outcome.ok else f"a program held {held}", outcome.ok
    )


async def _files(sandbox: Sandbox) -> SelfTestFinding:
    outcome = await sandbox.run("open('made.txt', 'w').write('made')")
    back = outcome.files.get("made.txt") == b"made"
    return SelfTestFinding("", "created files are returned" if back else "none: created files are lost")


async def _sessions(sandbox: Sandbox) -> SelfTestFinding:
    try:
        session = await sandbox.session("shell")
    except UserError:
        return SelfTestFinding("", "none: unusable for the terminal and swe worlds and the shell tool")
    try:
        await session.run("kept=5")
        value = await session.run("echo $kept")
    finally:
        await session.close()
    right = value.text == "5\n"
    return SelfTestFinding("", "keep their state" if right else f"lose their state: {value.text!r}", not right)


async def _network(sandbox: Sandbox) -> SelfTestFinding:
    names = (await sandbox.run(_NETWORK)).text.split()
    seen = [name for name in names if name != "lo"]
    if names == ["?"]:
        return SelfTestFinding("", "cannot be detected from inside")
    if not seen:
        return SelfTestFinding("", "programs see only a loopback interface")
    return SelfTestFinding("", f"programs see {', '.join(seen)}; connections are not tested")


async def _apart(sandbox: Sandbox) -> SelfTestFinding:
    name = f"ludus-{secrets.token_hex(8)}"
    await sandbox.run(_LEAVE.replace("NAME", name))
    places = (await sandbox.run(_FIND.replace("NAME", name))).text.split()
    if not places:
        return SelfTestFinding("", "files in /tmp and the folder are not visible to the next run")
    return SelfTestFinding("", f"the next run sees files left in {' and '.join(places)}")
