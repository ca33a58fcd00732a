"""What a backend does when it is asked: small programs of our own, one after another.

`python_inside` is the least of it and says whether the backend answers at all. `findings` tries what worlds
and graders rely on. Neither can tell what a backend protects its machine from: that is what it is built of.
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
"""A program that should end after one second and takes as much longer was not ended by the clock."""
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
    """What was tried and what came of it; `wrong`: worlds and graders rely on another result."""

    what: str
    found: str
    wrong: bool = False


async def python_inside(sandbox: Sandbox) -> str:
    """Python's version inside. Raises UserError where a program fails, WorldError where the backend does."""
    outcome = await sandbox.run(_VERSION)
    if not outcome.ok:
        raise UserError(
            f"The {sandbox.name} backend ran a program, which failed: {outcome.error_text[-300:]}"
        )
    return outcome.text.strip()


async def findings(sandbox: Sandbox) -> list[SelfTestFinding]:
    """What the backend does, one finding for each thing that is tried."""
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
    """What no program can find out about a backend, in a sentence."""
    if backend in SERVICES:
        return (
            "what the service keeps its own machine, its network and other users' runs safe from; whether it "
            "bounds CPU seconds, processes, open files and disk, which nobody asks of it; how it bears load"
        )
    if backend == "remote":
        return "what the backend behind the server protects from: docs/sandbox.md says it of each"
    return "what it protects from, which is what it is built of: docs/sandbox.md says what that is not"


async def _input(sandbox: Sandbox) -> SelfTestFinding:
    program = "import sys; print(open('given.txt').read() + sys.stdin.read(), end='')"
    outcome = await sandbox.run(program, files={"given.txt": b"one "}, stdin=b"two")
    right = outcome.text == "one two"
    return SelfTestFinding(
        "", "reach the program" if right else f"do not: it read {outcome.text!r}", not right
    )


async def _command(sandbox: Sandbox) -> SelfTestFinding:
    outcome = await sandbox.run(["echo", "a  b", "$HOME"])
    right = outcome.text == "a  b $HOME\n"
    return SelfTestFinding(
        "", "run, word by word" if right else f"do not: echo gave {outcome.text!r}", not right
    )


async def _exit(sandbox: Sandbox) -> SelfTestFinding:
    left, struck = (
        await sandbox.run("import sys; sys.exit(5)"),
        await sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    )
    right = left.exit == 5 and not struck.ok
    return SelfTestFinding(
        "", "are told" if right else f"are not: 5 is {left.exit}, a crash is {struck.exit}", not right
    )


async def _clock(sandbox: Sandbox) -> SelfTestFinding:
    begin = time.perf_counter()
    outcome = await sandbox.run("while True: pass", limits=Limits(wall_s=1.0))
    took_s = time.perf_counter() - begin
    right = outcome.timed_out and took_s < 1.0 + _LATE_S
    said = f"ends a program of more than 1 s after {took_s:.1f} s"
    return SelfTestFinding(
        "", said if right else f"does not hold: a program of 1 s took {took_s:.1f} s", not right
    )


async def _memory(sandbox: Sandbox) -> SelfTestFinding:
    program = f"held = b'x' * ({_LARGE_MIB} << 20); print(len(held))"
    outcome = await sandbox.run(program, limits=Limits(memory_bytes=_ROOM_MIB * MIB))
    held = f"{_LARGE_MIB} MiB where {_ROOM_MIB} are allowed"
    return SelfTestFinding(
        "", f"no program gets {held}" if not outcome.ok else f"a program got {held}", outcome.ok
    )


async def _files(sandbox: Sandbox) -> SelfTestFinding:
    outcome = await sandbox.run("open('made.txt', 'w').write('made')")
    back = outcome.files.get("made.txt") == b"made"
    return SelfTestFinding("", "what a run makes comes back" if back else "none: what a run makes is lost")


async def _sessions(sandbox: Sandbox) -> SelfTestFinding:
    try:
        session = await sandbox.session("shell")
    except UserError:
        return SelfTestFinding("", "none: the worlds terminal and swe and the tool shell cannot use it")
    try:
        await session.run("kept=5")
        value = await session.run("echo $kept")
    finally:
        await session.close()
    right = value.text == "5\n"
    return SelfTestFinding(
        "", "keep what was done" if right else f"do not keep it: {value.text!r}", not right
    )


async def _network(sandbox: Sandbox) -> SelfTestFinding:
    names = (await sandbox.run(_NETWORK)).text.split()
    seen = [name for name in names if name != "lo"]
    if names == ["?"]:
        return SelfTestFinding("", "cannot be told from inside")
    if not seen:
        return SelfTestFinding("", "programs see none but their own")
    return SelfTestFinding("", f"programs see {', '.join(seen)}; where that leads is not tried")


async def _apart(sandbox: Sandbox) -> SelfTestFinding:
    name = f"ludus-{secrets.token_hex(8)}"
    await sandbox.run(_LEAVE.replace("NAME", name))
    places = (await sandbox.run(_FIND.replace("NAME", name))).text.split()
    if not places:
        return SelfTestFinding("", "the next run does not find what one left in /tmp or its folder")
    return SelfTestFinding("", f"the next run finds what one left in {' and '.join(places)}")
