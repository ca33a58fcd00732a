"""Sessions in containers with a fake container engine, and the tools and worlds that need them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from battery_run import descendants
from container_engine import put_engine
from ludus.cli.main import main
from ludus.errors import UserError, WorldError
from ludus.sandbox import Limits, SandboxSettings, open_sandbox
from ludus.sandbox.base import FileChange, Snapshot
from ludus.sandbox.local import container
from ludus.tools.files import files_tools
from ludus.tools.workspace import Workspace, python_session_tool

pytestmark = pytest.mark.security
SETTINGS = SandboxSettings(backend="docker", image="image", sessions=3)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Puts a stand-in for an engine on PATH."""
    return partial(put_engine, tmp_path, monkeypatch)


def inside(act):
    """What `act(sandbox)` gives; no process may be left after it."""

    async def whole():
        sandbox = open_sandbox(SETTINGS)
        try:
            return await act(sandbox)
        finally:
            await sandbox.close()

    before = descendants()
    given = asyncio.run(whole())
    assert descendants() == before
    return given


def test_a_session_keeps_an_interpreter_and_its_files(engine):
    async def act(box):
        session = await box.session(files={"a/b": b"1"})
        assert (await session.run("x = int(open('a/b').read())\nx + 1")).text == "2\n"
        failed = await session.run("x + nothing")
        assert (failed.exit, "NameError" in failed.error_text) == (1, True)
        assert (await session.run("x")).text == "1\n"
        await session.close()
        with pytest.raises(WorldError, match="closed"):
            await session.run("x")

    log = engine()
    inside(act)
    (words,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"--rm", "--interactive", "--read-only"} <= set(words)
    assert words[words.index("--label") + 1] == "ludus"


def test_session_files_can_be_listed_read_and_restored(engine):
    async def act(box):
        session = await box.session("shell", files={"a": b"1", "run.sh": b"echo ran"})
        await session.change(FileChange({"b": b"2"}, {"run.sh": True}, frozenset({"a"})))
        assert (await session.run("X=7; ls; ./run.sh; echo t > /tmp/t")).text == "b\nrun.sh\nran\n"
        taken = await session.snapshot()
        assert taken == Snapshot({"b": b"2", "run.sh": b"echo ran"}, frozenset({"run.sh"}))
        await session.run("rm *; mkdir c; echo 3 > c/d")
        await session.restore(taken)
        assert (await session.run("ls; echo $X; cat /tmp/t")).text == "b\nrun.sh\n7\nt\n"
        assert [one.argv[0] for one in await session.processes()] == ["bash"]
        await session.reset()
        assert (await session.run("ls . /tmp; echo $X")).text == ".:\n\n/tmp:\n\n"
        await session.close()

    engine()
    inside(act)


def test_call_past_its_limits_loses_only_the_variables(engine):
    limits = Limits(wall_s=1, memory_bytes=200 * 2**20, output_bytes=1000)

    async def act(box):
        session = await box.session(limits=limits)
        await session.run("x = 1; open('f', 'w').write('kept')")
        assert (await session.run("import os\nos.fork()\nwhile True: pass")).timed_out
        lost = await session.run("print(open('f').read()); x")
        assert (lost.text, lost.exit) == ("kept\n", 1)
        big = await session.run("print('y' * 9000); y = bytearray(10**9)")
        assert (big.exit, big.truncated, len(big.stdout) <= 1000) == (1, True, True)
        refused = "import socket\ntry: socket.socket()\nexcept OSError as error: print(type(error).__name__)"
        assert (await session.run(refused)).text == "PermissionError\n"
        await session.close()

    engine()
    inside(act)


def test_program_that_breaks_its_supervisor_fails_alone_and_engine_failures_are_not_blamed_on_it(engine):
    def supervisor():
        """The last process of the session but one: bubblewrap, its process 1, the interpreter."""
        return sorted(descendants() - before)[-2]

    async def broken(box):
        session = await box.session(limits=Limits(wall_s=20))
        running = asyncio.create_task(session.run("import time; time.sleep(20)"))
        while len(descendants() - before) < 3:
            await asyncio.sleep(0.05)
        os.kill(supervisor(), signal.SIGKILL)
        outcome = await running
        assert (outcome.ok, outcome.signal) == (False, signal.SIGKILL)
        with pytest.raises(WorldError, match="closed"):
            await session.run("1")

    before = descendants()
    engine()
    inside(broken)
    engine("sys.exit('no such image')")
    with pytest.raises(WorldError, match="no such image"):
        inside(lambda box: box.session())


def test_open_sessions_close_with_the_sandbox_and_are_killed_if_necessary(engine, monkeypatch):
    monkeypatch.setattr(container, "GRACE_S", 0.5)

    async def act(box):
        await box.session("shell")
        for pid in descendants() - before:
            os.kill(pid, signal.SIGSTOP)

    before = descendants()
    log = engine()
    inside(act)
    run, *others = [json.loads(line) for line in log.read_text().splitlines()]
    assert others == [["rm", "--force", run[run.index("--name") + 1]]]


LEAVES = """
import asyncio, os
from ludus.sandbox import SandboxSettings, open_sandbox

async def leave():
    session = await open_sandbox(SandboxSettings(backend="docker", image="image")).session("shell")
    await session.run("sleep 1000 &")
    print("open", flush=True)
    os._exit(1)

asyncio.run(leave())
"""


def test_container_exits_with_its_client_process(engine, tmp_path):
    engine()
    with subprocess.Popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE) as child:
        assert child.stdout.read() == b"open\n"
    (name,) = (tmp_path / "names").iterdir()
    place = Path("/proc", name.read_text())
    for _ in range(200):
        if not place.exists() or "(zombie)" in (place / "status").read_text():
            return
        asyncio.run(asyncio.sleep(0.05))
    pytest.fail("the container lives on")


def test_container_sandbox_reports_its_session_capacity(engine):
    engine()
    box = open_sandbox(SETTINGS)
    assert box.max_sessions == 3
    assert open_sandbox(SandboxSettings(backend="docker")).max_sessions >= 2
    with pytest.raises(UserError, match="Unknown session kind"):
        asyncio.run(box.session("ruby"))


def test_session_tools_work_in_a_container(engine):
    async def act(box):
        workspace = Workspace(box, "python", {"a.txt": b"one two"}, Limits())
        edit = {one.name: one for one in files_tools(workspace)}
        python = python_session_tool(workspace)
        assert "two" in await edit["read_file"].function(path="a.txt")
        await edit["edit_file"].function(path="a.txt", old="one", new="1")
        await python.function(code="text = open('a.txt').read()")
        said = await python.function(code="text")
        await workspace.close()
        return said

    engine()
    assert "1 two" in inside(act)


def test_terminal_world_rewards_the_oracle_and_no_cheat_in_containers(engine, capsys):
    log = engine()
    words = ["--tasks", "2", "--sandbox.backend", "docker", "--sandbox.image", "image"]
    assert main(["env", "check", "terminal", *words]) == 0
    (oracle,) = [line for line in capsys.readouterr().out.splitlines() if "oracle " in line]
    assert "100%" in oracle
    assert len(log.read_text().splitlines()) > 20
