"""The other backends: the unsafe process, containers with a fake container engine, and the remote one."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial

import httpx
import pytest

from battery_run import descendants
from container_engine import put_engine
from ludus.errors import UserError, WorldError
from ludus.gateway.limits import HttpLimits, http_server
from ludus.sandbox import BACKENDS, Limits, NamespacesSandbox, SandboxSettings, open_sandbox
from ludus.sandbox.base import Snapshot
from ludus.sandbox.local import container
from ludus.sandbox.local.container import ContainerSandbox
from ludus.sandbox.local.unsafe_process import ProcessSandbox
from ludus.sandbox.remote.client import RemoteSandbox
from ludus.sandbox.remote.server import MAX_BODY_BYTES, SandboxServerSettings, make_app
from ludus.untrusted.json_service import error_response

pytestmark = pytest.mark.security
TOKEN = "a-token-of-the-tests"


def test_unknown_backend_is_rejected_with_the_available_names():
    with pytest.raises(UserError, match="namespaces, docker, podman, remote, sandbox_fusion, piston, process"):
        open_sandbox(SandboxSettings(backend="docker-compose"))
    assert isinstance(open_sandbox(), NamespacesSandbox)
    assert len(BACKENDS) == 7


def test_process_backend_without_the_unsafe_flag_raises_error():
    with pytest.raises(UserError, match="has no isolation"):
        open_sandbox(SandboxSettings(backend="process"))


def process(program, **given):
    return asyncio.run(ProcessSandbox(unsafe=True).run(program, **given))


def test_process_backend_returns_files_streams_and_exit_codes():
    program = "import sys\nprint(open('a/b').read() + input())\nopen('c', 'w').write('made')\nsys.exit(3)"
    outcome = process(program, files={"a/b": b"one "}, stdin=b"two\n")
    assert (outcome.text, outcome.exit, outcome.files) == ("one two\n", 3, {"c": b"made"})
    assert outcome.peak_memory_bytes > 2**20
    assert process(["sh", "-c", "kill -9 $$"]).signal == 9
    assert process(["no-such-command"]).exit == 127


def test_process_is_not_charged_with_memory_of_its_parent():
    held = bytearray(b"1") * (200 << 20)
    outcome = process("import time; held = bytearray(b'1') * (60 << 20); time.sleep(0.2)")
    assert len(held) > 2 * outcome.peak_memory_bytes > 2 * (60 << 20), outcome


def test_process_backend_enforces_limits():
    before = descendants()
    late = process("import os\nprint('x', flush=True)\nos.fork()\nwhile True: pass", limits=Limits(wall_s=2))
    assert (late.timed_out, late.text) == (True, "x\n")
    assert process("x = bytearray(10**9)", limits=Limits(memory_bytes=200 * 2**20)).memory_exceeded
    cut = process("print('x' * 300_000)", limits=Limits(output_bytes=1000))
    assert (cut.stdout[-2:], len(cut.stdout) <= 1000, cut.truncated) == (b"x\n", True, True)
    held = process(["sh", "-c", "sleep 30 & echo done"], limits=Limits(wall_s=20))
    assert (held.text, held.wall_s < 15) == ("done\n", True)
    assert descendants() == before


def test_a_cancelled_process_is_killed():
    async def act():
        task = asyncio.create_task(ProcessSandbox(unsafe=True).run("while True: pass"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = descendants()
    asyncio.run(act())
    assert descendants() == before


def test_process_backend_sessions_raise_error():
    with pytest.raises(UserError, match="does not support sessions"):
        asyncio.run(ProcessSandbox(unsafe=True).session())


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Puts a stand-in for an engine on PATH."""
    return partial(put_engine, tmp_path, monkeypatch)


def contained(program, settings=None, **given):
    return asyncio.run(ContainerSandbox(settings or SandboxSettings("docker", image="image")).run(program, **given))


def test_container_is_started_with_all_isolation_options(engine):
    log = engine()
    limits = Limits(processes=7, memory_bytes=100 * 2**20, disk_bytes=2**20, disk_files=99)
    outcome = contained("print(input()); open('o', 'w').write('x')", files={"i": b"1"}, stdin=b"hi", limits=limits)
    assert (outcome.text, outcome.exit, outcome.files) == ("hi\n", 0, {"o": b"x"})
    words = json.loads(log.read_text())
    pairs = set(itertools.pairwise(words))
    memory = str((100 + 1 + 64) * 2**20)
    assert {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--user", "65534:65534"),
        ("--pids-limit", "9"),
        ("--memory", memory),
        ("--memory-swap", memory),
        ("--pull", "never"),
        ("--label", "ludus"),
        ("--shm-size", "1048576"),
        ("--env", "PYTHONDONTWRITEBYTECODE=1"),
    } <= pairs
    assert {"--rm", "--read-only", "--interactive"} <= set(words)
    assert any(word.startswith("/box:") and "size=1048576,nr_inodes=99" in word for word in words)
    assert not any(word in ("--privileged", "-v", "--volume", "--mount") for word in words)
    podman = container.run_arguments(SandboxSettings("podman"), limits, "name")
    assert not any("nr_inodes" in word for word in podman)  # Podman rejects it


def test_the_supervisor_of_a_container_keeps_the_limits(engine):
    engine()
    late = contained("import os\nos.fork()\nwhile True: pass", limits=Limits(wall_s=0.5))
    assert late.timed_out
    filtered = contained("import os, socket\ntry: socket.socket()\nexcept OSError as e: print(type(e).__name__)")
    assert filtered.text == "PermissionError\n"
    failed = contained(["sh", "-c", "exit 4"])
    assert failed.exit == 4


def test_failing_container_engine_reports_the_reason(engine):
    engine("sys.exit('no such image')")
    with pytest.raises(WorldError, match="no such image"):
        contained("print(1)")


def cancelled(log):
    """Cancel a run in a container; gives what the engine was told after it."""

    async def act():
        task = asyncio.create_task(ContainerSandbox(SandboxSettings("docker", image="image")).run("while True: pass"))
        while not log.read_text():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = descendants()
    asyncio.run(act())
    assert descendants() == before
    run, *others = [json.loads(line) for line in log.read_text().splitlines()]
    return run[run.index("--name") + 1], others


def test_cancelled_container_is_removed(engine):
    assert cancelled(engine())[1] == []


def test_container_that_does_not_stop_is_force_removed(engine, monkeypatch):
    monkeypatch.setattr(container, "GRACE_S", 0.5)
    name, others = cancelled(engine("import time; time.sleep(60)"))
    assert others == [["rm", "--force", name]]


def test_missing_gvisor_runtime_raises_error(engine, tmp_path):
    log = engine()
    settings = SandboxSettings("docker", image="image", runtime="runsc")
    with pytest.raises(UserError, match="runsc"):
        contained("print(1)", settings)
    (tmp_path / "runsc").write_text("")
    (tmp_path / "runsc").chmod(0o755)
    assert contained("print(1)", settings).text == "1\n"
    assert '"--runtime", "runsc"' in log.read_text()


def test_missing_container_engine_raises_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="apt-get install podman"):
        open_sandbox(SandboxSettings(backend="podman"))
    with pytest.raises(UserError, match="docker, podman"):
        ContainerSandbox(SandboxSettings("lxc"))


@contextmanager
def serving(sandbox=None, **settings):
    """A sandbox server in a thread, and its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    given = SandboxServerSettings(**({"token": TOKEN, "ceiling": Limits()} | settings))
    app = make_app(sandbox or ProcessSandbox(unsafe=True), given)
    server = http_server(app, HttpLimits(body_bytes=MAX_BODY_BYTES), error_response, lifespan=True)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def remotely(url, act, token=TOKEN):
    async def whole():
        sandbox = RemoteSandbox(SandboxSettings(url=url, token=token))
        try:
            return await act(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(whole())


def test_the_remote_backend_returns_the_results_of_its_backend():
    with serving() as url:
        program = "import sys; open('o', 'wb').write(sys.stdin.buffer.read())\n"
        program += "print(open('i').read(), 'ü'); exit(5)"
        given = {"files": {"i": b"in"}, "stdin": bytes(range(256))}
        outcome = remotely(url, lambda box: box.run(program, **given))
        assert (outcome.stdout, outcome.exit, outcome.files) == ("in ü\n".encode(), 5, {"o": bytes(range(256))})
        assert remotely(url, lambda box: box.run(["sh", "-c", "kill -9 $$"])).signal == 9
        assert remotely(url, lambda box: box.run("while True: pass", limits=Limits(wall_s=0.3))).timed_out


def test_remote_session_supports_all_session_operations():
    async def act(box):
        session = await box.session("shell", files={"a": b"1"})
        assert (await session.run("X=7; cat a")).text == "1"
        snapshot = await session.snapshot()
        assert snapshot == Snapshot({"a": b"1"})
        await session.write({"b": b"2"})
        assert (await session.run("ls; echo $X")).text == "a\nb\n7\n"
        await session.restore(snapshot)
        assert (await session.run("ls")).text == "a\n"
        assert [one.argv[0] for one in await session.processes()] == ["bash"]
        await session.reset()
        assert (await session.run("ls; echo $X")).text == "\n"
        await session.close()
        with pytest.raises(WorldError, match="does not exist"):
            await session.run("ls")

    before = descendants()
    with serving(NamespacesSandbox()) as url:
        remotely(url, act)
    assert descendants() == before


def test_sandbox_server_rejects_invalid_requests():
    with serving(sessions=0) as url:
        with pytest.raises(UserError, match="Invalid sandbox server token"):
            remotely(url, lambda box: box.run("print(1)"), token="wrong")
        with pytest.raises(UserError, match="memory_bytes"):
            remotely(url, lambda box: box.run("print(1)", limits=Limits(memory_bytes=2**40)))
        with pytest.raises(WorldError, match="sessions"):
            remotely(url, lambda box: box.session())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        bad = httpx.post(f"{url}/v1/runs", content=b'{"content": {}}', headers=headers, trust_env=False)
        assert bad.status_code == 400, bad.text
        assert "content.source: Field required" in bad.json()["message"]
        large = httpx.post(f"{url}/v1/runs", content=bytes(65 * 2**20), headers=headers, trust_env=False)
        assert large.status_code == 413


def test_unused_sessions_are_closed():
    async def act(box):
        first = await box.session("shell")
        await asyncio.sleep(0.3)
        await box.session("shell")
        with pytest.raises(WorldError, match="does not exist"):
            await first.run("echo")

    with serving(NamespacesSandbox(), idle_s=0.2) as url:
        remotely(url, act)


def test_unreachable_server_is_named_and_a_silent_one_times_out():
    with pytest.raises(UserError, match="sandbox serve"):
        open_sandbox(SandboxSettings(backend="remote"))
    with pytest.raises(WorldError, match="is unreachable"):
        remotely("http://127.0.0.1:9", lambda box: box.run("print(1)"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sandbox = RemoteSandbox(SandboxSettings(url=url, token=TOKEN), margin_s=0.2)
        with pytest.raises(WorldError, match="did not respond within"):
            asyncio.run(sandbox.run("print(1)", limits=Limits(wall_s=0.1)))


def test_sandbox_command_serves_and_prints_its_address(tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "ludus", "sandbox", "serve", "--port", "0", "--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            url = line.split()[-1]
            assert "namespaces" in line
            assert remotely(url, lambda box: box.run("print(6 * 7)")).text == "42\n"
        finally:
            server.terminate()
            server.wait(20)


def test_token_file_without_a_valid_token_is_rejected(tmp_path, capsys):
    from ludus.cli.main import main

    (tmp_path / "token").write_text("short")
    assert main(["sandbox", "serve", "--token-file", str(tmp_path / "token")]) == 2
    assert "no token" in capsys.readouterr().err
    assert main(["sandbox", "check"]) == 0
    assert "namespaces backend runs programs" in capsys.readouterr().out
