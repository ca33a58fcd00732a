"""Self-test of a sandbox backend by small programs.

`python_version` checks that the backend runs at all. `run_self_test` checks the behaviour that worlds and graders rely
on. Neither can test isolation, which depends on the backend's construction.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ludus.errors import LudusError, UserError
from ludus.sandbox import SERVICES
from ludus.sandbox.base import MIB, Limits, Sandbox

_LATE_S = 10.0  # if a program exceeds its 1 s limit by this many seconds, the limit did not stop it
_ALLOCATED_MIB, _LIMIT_MIB = 512, 256

_NETWORK = """
try:
    lines = open('/proc/net/dev').read().splitlines()[2:]
    print(*sorted(line.split(':')[0].strip() for line in lines))
except OSError:
    print('?')
"""
_FIND_FILES = """
import os
for folder in ('/tmp', '.'):
    if os.path.exists(f'{folder}/NAME'):
        print(folder)
        os.remove(f'{folder}/NAME')
"""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Result of one test; `failed` if worlds and graders rely on another result."""

    test: str
    result: str
    failed: bool = False


async def python_version(sandbox: Sandbox) -> str:
    """Return the sandbox's Python version. Raises UserError if the program fails, WorldError if the backend does."""
    outcome = await sandbox.run("import platform; print(platform.python_version())")
    if not outcome.ok:
        raise UserError(f"The {sandbox.name} backend ran a test program, which failed: {outcome.error_text[-300:]}")
    return outcome.text.strip()


async def run_self_test(sandbox: Sandbox) -> list[SelfTestResult]:
    """Run all tests and return their results."""
    results = []
    for name, test in _TESTS.items():
        try:
            results.append(SelfTestResult(name, *await test(sandbox)))
        except LudusError as error:
            results.append(SelfTestResult(name, str(error), failed=True))
    return results


def untested_properties(backend: str) -> str:
    """Return a sentence about properties of the backend that cannot be tested."""
    if backend in SERVICES:
        return (
            "whether the service isolates its machine, its network and other users' runs; whether it "
            "limits CPU seconds, processes, open files and disk, which are not requested; its load capacity"
        )
    if backend == "remote":
        return "the isolation of the backend behind the server: see docs/use/sandbox.md"
    return "its isolation, which depends on its construction: see docs/use/sandbox.md"


async def _input(sandbox: Sandbox) -> tuple[str, bool]:
    program = "import sys; print(open('given.txt').read() + sys.stdin.read(), end='')"
    text = (await sandbox.run(program, files={"given.txt": b"one "}, stdin=b"two")).text
    return (
        ("reach the program", False) if text == "one two" else (f"do not reach the program, which read {text!r}", True)
    )


async def _command(sandbox: Sandbox) -> tuple[str, bool]:
    text = (await sandbox.run(["echo", "a  b", "$HOME"])).text
    return ("run with exact arguments", False) if text == "a  b $HOME\n" else (f"fail: echo printed {text!r}", True)


async def _exit(sandbox: Sandbox) -> tuple[str, bool]:
    exited = await sandbox.run("import sys; sys.exit(5)")
    crashed = await sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    if exited.exit == 5 and not crashed.ok:
        return "are reported", False
    return f"are wrong: {exited.exit} instead of 5, {crashed.exit} after a crash", True


async def _clock(sandbox: Sandbox) -> tuple[str, bool]:
    begin = time.perf_counter()
    outcome = await sandbox.run("while True: pass", limits=Limits(wall_s=1.0))
    took_s = time.perf_counter() - begin
    if outcome.timed_out and took_s < 1.0 + _LATE_S:
        return f"stops a program with a limit of 1 s after {took_s:.1f} s", False
    return f"fails: a program with a limit of 1 s took {took_s:.1f} s", True


async def _memory(sandbox: Sandbox) -> tuple[str, bool]:
    program = f"data = b'x' * ({_ALLOCATED_MIB} << 20); print(len(data))"
    outcome = await sandbox.run(program, limits=Limits(memory_bytes=_LIMIT_MIB * MIB))
    allocated = f"{_ALLOCATED_MIB} MiB with a limit of {_LIMIT_MIB}"
    return f"a program allocated {allocated}" if outcome.ok else f"programs cannot allocate {allocated}", outcome.ok


async def _files(sandbox: Sandbox) -> tuple[str, bool]:
    outcome = await sandbox.run("open('made.txt', 'w').write('made')")
    returned = outcome.files.get("made.txt") == b"made"
    return "created files are returned" if returned else "none: created files are lost", False


async def _sessions(sandbox: Sandbox) -> tuple[str, bool]:
    try:
        session = await sandbox.session("shell")
    except UserError:
        return "none: unusable for the terminal and swe worlds and the shell tool", False
    try:
        await session.run("kept=5")
        value = await session.run("echo $kept")
    finally:
        await session.close()
    passed = value.text == "5\n"
    return "keep their state" if passed else f"lose their state: {value.text!r}", not passed


async def _network(sandbox: Sandbox) -> tuple[str, bool]:
    interfaces = (await sandbox.run(_NETWORK)).text.split()
    if interfaces == ["?"]:
        return "cannot be detected from inside", False
    others = ", ".join(name for name in interfaces if name != "lo")
    return f"programs see {f'{others}; connections are not tested' if others else 'only a loopback interface'}", False


async def _separation(sandbox: Sandbox) -> tuple[str, bool]:
    name = f"ludus-{secrets.token_hex(8)}"
    await sandbox.run(f"for folder in ('/tmp', '.'): open(folder + '/{name}', 'w').write('left')")
    folders = (await sandbox.run(_FIND_FILES.replace("NAME", name))).text.split()
    if not folders:
        return "files in /tmp and the folder are not visible to the next run", False
    return f"the next run sees files left in {' and '.join(folders)}", False


_TESTS: dict[str, Callable[[Sandbox], Awaitable[tuple[str, bool]]]] = {
    "files and standard input": _input,
    "commands": _command,
    "exit codes": _exit,
    "wall clock limit": _clock,
    "memory limit": _memory,
    "returned files": _files,
    "sessions": _sessions,
    "network": _network,
    "separation of runs": _separation,
}
