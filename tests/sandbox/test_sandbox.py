"""The default sandbox: results of runs and sessions, limits, and refused operations."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from battery_run import a_folder, descendants
from ludus.errors import UserError, WorldError
from ludus.sandbox import Limits, NamespacesSandbox, SandboxSettings
from ludus.sandbox.base import FileChange, Snapshot
from ludus.sandbox.guest.streams import BoundedOutput
from ludus.sandbox.guest.wire import as_json, frame_sizes, pack_request, pack_response, unpack_frame
from ludus.sandbox.local import namespaces, supervisor_client
from ludus.sandbox.local.namespaces import find_python, zygote_command
from ludus.sandbox.local.seccomp import seccomp_filter
from ludus.sandbox.local.supervisor_client import SupervisorSocket
from waiting import until

BOX = NamespacesSandbox


def inside(act, settings: SandboxSettings | None = None, **more):
    """What `act(sandbox)` gives; nothing may be left after it."""

    async def whole():
        sandbox = BOX(settings or SandboxSettings(concurrency=2), **more)
        try:
            return await act(sandbox)
        finally:
            await sandbox.close()

    before = descendants()
    result = asyncio.run(whole())
    assert {pid: names_of(pid) for pid in descendants() - before} == {}
    return result


def names_of(pid: int) -> str:
    return open(f"/proc/{pid}/status").read()[:300] + open(f"/proc/{pid}/cmdline").read()[:300]


def run(program, **given):
    return inside(lambda box: box.run(program, **given))


def test_a_program_reads_files_and_stdin_and_returns_files_and_its_exit_code():
    program = (
        "import sys\nprint(open('in/a.txt').read() + input())\nprint('bad', file=sys.stderr)\n"
        "open('out.bin', 'wb').write(bytes(range(256)))\nopen('in/b.txt', 'w').write('changed')\nexit(7)"
    )
    outcome = run(program, files={"in/a.txt": b"one ", "in/b.txt": b"two"}, stdin=b"two\nthree\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit) == (b"one two\n", b"bad\n", 7)
    assert outcome.files == {"out.bin": bytes(range(256)), "in/b.txt": b"changed"}
    assert (outcome.signal, outcome.timed_out, outcome.memory_exceeded, outcome.truncated) == (None,) + (False,) * 3
    assert not outcome.ok
    assert outcome.peak_memory_bytes > 2**20
    assert 0 <= outcome.cpu_s <= 10 * outcome.wall_s


def test_command_runs_unmodified():
    async def act(box):
        return (
            await box.run(["sh", "-c", 'echo "$1"; cat; kill -9 $$', "sh", "a  b"], stdin=b"x" * 200_000),
            await box.run(["no-such-command"]),
        )

    shell, missing = inside(act)
    assert shell.stdout.startswith(b"a  b\n" + b"x" * 40_000)
    assert (shell.exit, shell.signal, shell.truncated) == (None, signal.SIGKILL, True)
    assert (missing.exit, missing.ok) == (127, False)
    assert b"no-such-command" in missing.stderr


def test_program_runs_as_main_module_with_a_traceback_without_internal_frames():
    program = "import pickle\nclass A: pass\npickle.dumps(A())\ndef f(): return 1 / 0\nprint(__name__)\nf()"
    outcome = run(program)
    assert outcome.text == "__main__\n"
    assert outcome.exit == 1
    assert 'File "main.py", line 4, in f' in outcome.error_text
    assert "return 1 / 0" in outcome.error_text
    assert "ludus" not in outcome.error_text


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise SystemExit('said')", 1, "said\n"),
        ("import sys; sys.exit(300)", 300 & 255, ""),
        ("x = (", 1, "SyntaxError"),
        ("'\ud800'", 0, ""),
        ("import atexit, os; atexit.register(os.write, 2, b'later')", 0, "later"),
        ("import threading, time; threading.Timer(0.05, lambda: print('t')).start()", 0, ""),
    ],
)
def test_exit_codes_match_those_of_an_interpreter(program, code, words, shared_box):
    outcome = shared_box(program)
    if program != "'\ud800'":
        assert outcome.exit == code
    assert words in outcome.error_text


@pytest.fixture
def shared_box():
    """Runs programs in one sandbox."""
    with asyncio.Runner() as runner:
        box = BOX(SandboxSettings(concurrency=2))
        yield lambda program, **given: runner.run(box.run(program, **given))
        runner.run(box.close())


def test_each_limit_of_time_memory_and_disk_is_reported(shared_box):
    assert shared_box("while True: pass", limits=Limits(wall_s=0.3)).timed_out
    hog = shared_box("while True: pass", limits=Limits(wall_s=20, cpu_s=0.2))
    assert (hog.timed_out, hog.wall_s < 15) == (True, True)
    large = shared_box("x = bytearray(10**9)", limits=Limits(memory_bytes=128 * 2**20))
    assert (large.memory_exceeded, large.exit) == (True, 1)
    cut = shared_box("print('x' * 5000)", limits=Limits(output_bytes=1000))
    assert (len(cut.stdout) <= 1000, cut.truncated, cut.exit) == (True, True, 0)
    small = shared_box("print('x' * 5000)", limits=Limits(output_bytes=100))
    assert (small.stdout, small.omitted_bytes) == (b"x" * 100, 4901)
    many = shared_box("for n in range(9): open(f'{n}', 'w').write('x')", limits=Limits(files_out=4))
    assert (sorted(many.files), many.truncated) == (["0", "1", "2", "3"], True)
    full = shared_box("open('x', 'wb').write(bytes(3 * 2**20))", limits=Limits(disk_bytes=2**20))
    assert (full.exit, "No space left" in full.error_text) == (1, True)


@pytest.mark.parametrize("in_session", [False, True])
def test_head_and_tail_of_long_output_are_kept_and_the_rest_is_counted(in_session):
    program = "import sys\nprint('BEGIN' + 'x' * 3_000_000 + 'END')\nprint('few', file=sys.stderr)"

    async def act(box):
        one = await box.session() if in_session else box
        return await one.run(program), await one.run("print('next')")

    long, following = inside(act)
    head, _, rest = long.text.partition("\n[")
    note, _, tail = rest.partition("]\n")
    assert (head[:6], tail[-5:], long.stderr) == ("BEGINx", "xEND\n", b"few\n")
    assert note == f"{long.omitted_bytes} bytes left out"
    assert len(head) + len(tail) + long.omitted_bytes == 3_000_009
    assert len(long.stdout) <= 64 * 1024 < len(long.stdout) + 64
    assert (long.truncated, following.text, following.omitted_bytes) == (True, "next\n", 0)


@pytest.mark.parametrize("bound", [10, 255, 256, 1000])
@pytest.mark.parametrize("size", [0, 9, 256, 257, 1000, 1001, 1300, 5000])
def test_stream_buffer_respects_its_limit_and_counts_dropped_bytes(bound, size):
    data = bytes(n % 251 for n in range(size))
    for step in (7, 64, 10_000):
        kept = BoundedOutput(bound)
        for begin in range(0, size, step):
            kept.add(data[begin : begin + step])
        omitted, text = kept.omitted_bytes, kept.take()
        assert len(text) <= bound
        head, _, tail = text.partition(f"\n[{omitted} bytes left out]\n".encode())
        assert data.startswith(head)
        assert data.endswith(tail)
        assert len(head) + len(tail) + omitted == size
        assert bool(omitted) == (size > bound)
        assert (kept.omitted_bytes, kept.take()) == (0, b"")


def test_concurrent_runs_are_isolated():
    program = "import os, time\nopen('mine', 'w').write(input())\ntime.sleep(0.1)\n"
    program += "print(os.listdir(), open('mine').read())"

    async def act(box):
        return await asyncio.gather(*(box.run(program, stdin=b"%d\n" % n) for n in range(6)))

    outcomes = inside(act, SandboxSettings(concurrency=3))
    assert [o.text for o in outcomes] == [f"['mine'] {n}\n" for n in range(6)]


def test_cancelled_run_is_cleaned_up_and_the_sandbox_stays_usable():
    async def act(box):
        task = asyncio.create_task(box.run("while True: pass"))
        await until(lambda: supervisors_of(box))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not box._open
        return await box.run("print(1)")

    assert inside(act).text == "1\n"


def test_killed_zygote_is_replaced():
    async def act(box):
        await box.run("print(1)")
        running = asyncio.create_task(box.run("import time; time.sleep(20)"))
        await until(lambda: supervisors_of(box))
        for broken in box._open:
            signal.pidfd_send_signal(broken.pidfd, signal.SIGKILL)
        with pytest.raises(WorldError):
            await running
        return await box.run("print(2)")

    assert inside(act).text == "2\n"


def test_program_with_an_unresponsive_supervisor_times_out(monkeypatch):
    monkeypatch.setattr(supervisor_client, "GRACE_S", 0.5)
    foreign = descendants()

    async def act(box):
        await box.run("print(1)")
        running = asyncio.create_task(box.run("import time; time.sleep(20)", limits=Limits(wall_s=1)))
        await until(lambda: supervisors_of(box))  # the program runs: its supervisor was handed over
        for pid in descendants() - foreign:
            os.kill(pid, signal.SIGSTOP)
        stuck = await running
        monkeypatch.undo()
        return stuck, await box.run("print(2)")

    stuck, after = inside(act)
    assert (stuck.timed_out, stuck.ok, after.text) == (True, False, "2\n")


def supervisors_of(box: NamespacesSandbox) -> list[int]:
    """The children of zygotes that have a program."""
    known = [Path(f"/proc/self/fdinfo/{one.pidfd}").read_text() for one in box._open]
    zygotes = {int(text.partition("\nPid:")[2].split()[0]) for text in known}
    parents = {pid: parent_of(pid) for pid in descendants()}
    return [parent for parent in parents.values() if parents.get(parent) in zygotes]


def parent_of(pid: int) -> int:
    """The parent, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("in_session", [False, True])
def test_killed_supervisor_fails_its_program_and_the_zygote_survives(in_session):
    async def act(box):
        session = await box.session() if in_session else None
        sleep = "import time; time.sleep(20)"
        running = asyncio.create_task(session.run(sleep) if session else box.run(sleep))
        while not (supervisors := supervisors_of(box)):
            await asyncio.sleep(0.05)
        os.kill(supervisors[0], signal.SIGKILL)
        broken = await running
        if session:
            with pytest.raises(WorldError, match="closed"):
                await session.run("1")
        return broken, await box.run("print(2)")

    broken, after = inside(act)
    assert (broken.ok, broken.timed_out, broken.signal) == (False, False, signal.SIGKILL)
    assert after.text == "2\n"


@pytest.mark.security
def test_session_with_an_unresponsive_supervisor_is_lost(monkeypatch):
    monkeypatch.setattr(supervisor_client, "GRACE_S", 0.3)
    foreign = descendants()

    async def act(box):
        session = await box.session("shell", limits=Limits(wall_s=1))
        for pid in descendants() - foreign:
            os.kill(pid, signal.SIGSTOP)
        assert (await session.run("echo 1")).timed_out
        assert not box._open
        with pytest.raises(WorldError, match="closed"):
            await session.run("echo 2")

    inside(act)


def test_random_numbers_differ_between_runs(shared_box):
    program = "import random, uuid; print(random.random(), uuid.uuid4())"
    assert len({shared_box(program).stdout for _ in range(3)}) == 3


async def processes_once(session, holds):
    """The processes of a session once `holds` of them, or what they are after 20 s."""
    for _ in range(400):
        found = await session.processes()
        if holds(found):
            break
        await asyncio.sleep(0.05)
    return found


def test_session_lists_the_same_processes_as_the_kernel():
    async def act(box):
        session = await box.session("shell")
        rename = "import signal; open('/proc/self/comm', 'w').write('b) S 1'); signal.pause()"
        await session.run(f'(A=1 setsid python3 -c "{rename}" > /dev/null 2>&1 &)')
        shell, inner = await processes_once(session, lambda all: (all[-1].title, all[-1].state) == ("b) S 1", "S"))
        again = await session.processes()
        await session.run(f"kill -STOP {inner.pid}; mkdir -p x; (cd x; exec -a other sleep 60 &)")
        _, stopped, other = await processes_once(session, lambda all: all[1].state == "T" and all[-1].title == "sleep")
        await session.run(f"kill -9 {inner.pid} {other.pid}")
        left = await processes_once(session, lambda all: len(all) == 1)
        await session.close()
        return shell, inner, again, stopped, other, left

    shell, inner, again, stopped, other, left = inside(act)
    assert (inner.title, inner.state, inner.argv[:2]) == ("b) S 1", "S", ("python3", "-c"))
    assert (inner.environment["A"], inner.folder) == ("1", "/box")
    assert "/usr/bin/python3" in inner.program
    assert [(one.pid, one.started) for one in again] == [(one.pid, one.started) for one in (shell, inner)]
    assert (stopped.state, stopped.pid, stopped.started) == ("T", inner.pid, inner.started)
    assert (other.argv[0], other.folder, Path(other.program).name) == ("other", "/box/x", "sleep")
    assert [one.pid for one in left] == [shell.pid]


def test_oversized_process_listing_raises_error():
    async def act(box):
        session = await box.session("shell", limits=Limits(processes=60))
        await session.run('for i in $(seq 40); do A=$(printf "%04000d" 0) sleep 60 & done')
        begun = "until [ $(grep -l sleep /proc/[0-9]*/comm 2>&1 | wc -l) -ge 40 ]; do sleep 0.02; done"
        await session.run(begun)
        with pytest.raises(WorldError, match="arguments and variables of"):
            await session.processes()
        assert (await session.run("echo on")).text == "on\n"
        await session.close()

    inside(act)


def test_python_session_preserves_its_state():
    async def act(box):
        session = await box.session(files={"data.txt": b"12"})
        said = [
            await session.run(code)
            for code in (
                "x = int(open('data.txt').read())\nx + 1",
                "def f(): return x * 2\nprint('out'); import sys; print('err', file=sys.stderr)\nf()",
                "1 / 0",
                "x",
                "exit(3)",
                "x",
                "x = (",
            )
        ]
        assert [o.text for o in said] == ["13\n", "out\n24\n", "", "12\n", "", "12\n", ""]
        assert [o.exit for o in said] == [0, 0, 1, 0, 3, 0, 1]
        assert 'File "<call 3>", line 1' in said[2].error_text
        assert said[1].stderr == b"err\n"
        await session.close()
        with pytest.raises(WorldError):
            await session.run("x")

    inside(act)


def test_shell_session_preserves_working_directory_and_variables():
    async def act(box):
        session = await box.session("shell")
        outcomes = [
            await session.run(c)
            for c in ("mkdir a; cd a; X=5; f() { echo f$X; }", "pwd; f; false", "exit 4", "pwd; echo $X")
        ]
        assert [(o.text, o.exit) for o in outcomes] == [("", 0), ("/box/a\nf5\n", 1), ("", 4), ("/box\n\n", 0)]
        big = await session.run(": " + "x" * 300_000 + "\necho after")
        assert big.text == "after\n"

    inside(act)


def test_shell_session_survives_functions_that_shadow_its_loop_commands():
    async def act(box):
        session = await box.session("shell", limits=Limits(wall_s=10))
        first = await session.run("X=5; " + "; ".join(f"{n}() {{ echo {n}; }}" for n in ("read", "eval", "printf")))
        second = await session.run("read; eval; printf; echo $X; (exit 7)")
        third = await session.run("enable -n printf; false")
        assert [(o.text, o.exit) for o in (first, second, third)] == [("", 0), ("read\neval\nprintf\n5\n", 7), ("", 1)]

    inside(act)


def test_call_timeout_ends_the_interpreter_and_keeps_the_files():
    async def act(box):
        session = await box.session(limits=Limits(wall_s=3))
        await session.run("x = 1; open('kept', 'w').write('k')")
        late = await session.run("import os\nif os.fork(): print('begun', flush=True)\nwhile True: pass")
        assert (late.timed_out, late.text) == (True, "begun\n")
        after = await session.run("print(open('kept').read()); x")
        assert (after.text, after.exit) == ("k\n", 1)
        gone = await session.run("import os; os._exit(9)")
        assert (gone.exit, (await session.run("'again'")).text) == (9, "'again'\n")

    inside(act)


def test_background_processes_are_limited():
    async def act(box):
        session = await box.session("shell", limits=Limits(wall_s=5, cpu_s=0.3, memory_bytes=128 * 2**20))
        before = set(descendants())
        await session.run("while :; do :; done &")
        started, deadline = set(descendants()) - before, time.monotonic() + 20
        assert started
        while started & set(descendants()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        over = await session.run("echo here")
        return over, await session.run("jobs; echo again")

    over, again = inside(act)
    assert (over.timed_out, again.text) == (True, "again\n")


def test_snapshot_restore_recovers_files():
    async def act(box):
        session = await box.session("shell", files={"a/x.sh": b"echo one"})
        await session.run("chmod +x a/x.sh; ln -s /etc/passwd link; mkfifo pipe; Y=3")
        snapshot = await session.snapshot()
        assert snapshot == Snapshot({"a/x.sh": b"echo one"}, frozenset({"a/x.sh"}))
        await session.run("rm -r a; mkdir -p deep/er; echo more > deep/er/file; chmod 0 deep")
        await session.restore(snapshot)
        assert (await session.run("find . -type f; sh a/x.sh; ./a/x.sh; echo $Y")).text == "./a/x.sh\none\none\n3\n"
        await session.write({"b.txt": b"new"})
        assert (await session.run("cat b.txt")).text == "new"
        await session.reset()
        assert (await session.run("ls -A; echo $Y")).text == "\n"
        second = await box.session("python")
        await second.restore(snapshot)
        assert (await second.run("open('a/x.sh').read()")).text == "'echo one'\n"

    inside(act)


def test_session_write_follows_no_symlinks():
    async def act(box):
        session = await box.session("shell")
        await session.run("ln -s /tmp out; ln -s /tmp/file file; mkfifo pipe")
        for path in ("out/file", "file", "pipe"):
            with pytest.raises(WorldError, match="sandbox failed"):
                await session.write({path: b"x"})
        assert (await session.run("ls /tmp")).text == ""

    inside(act)


def test_file_change_writes_chmods_and_removes_files_without_following_symlinks():
    async def act(box):
        session = await box.session("shell", files={"a/x": b"old", "a/y": b"y", "z": b"z"})
        await session.run("ln -s /tmp out; touch /tmp/kept; ln -s /tmp/kept link; chmod 710 a/y; cd a")
        for change in (
            FileChange(remove=frozenset({"out/kept"})),
            FileChange(executable={"link": True}),
            FileChange(executable={"out/kept": True}),
            FileChange(remove=frozenset({"a"})),
        ):
            with pytest.raises(WorldError, match="sandbox failed"):
                await session.change(change)
        with pytest.raises(UserError):
            await session.change(FileChange(remove=frozenset({"../x"})))
        await session.change(FileChange({"a/x": b"new", "b/n": b"n"}, {"b/n": True, "a/y": False}, frozenset({"z"})))
        look = await session.run("cat x; cd ..; stat -c '%n %a' a/* b/n; ls; stat -c %a /tmp/kept")
        return look.text.splitlines()

    told = ["newa/x 644", "a/y 600", "b/n 755", "a", "b", "link", "out", "644"]
    assert inside(act) == told


def test_session_with_too_many_files_reports_it():
    async def act(box):
        session = await box.session("shell", limits=Limits(files_out=2))
        await session.run("touch a b c")
        with pytest.raises(WorldError, match="exceed its limits"):
            await session.snapshot()

    inside(act)


ODD = """
mkdir -p $(printf 'd/%.0s' $(seq 40)); touch $(printf 'd/%.0s' $(seq 40))/deep
touch $'a\tb' plain; ln plain linked; mkdir $'c\nd'; touch $'c\nd/inner' one
L=$(printf 'x%.0s' $(seq 200)); mkdir -p $L/$L; touch $L/$L/$L $L/$L/short
"""


def test_snapshot_counts_files_with_undecodable_names():
    async def act(box):
        session = await box.session("shell")
        assert (await session.snapshot()).skipped == 0
        await session.run(ODD)
        odd = await session.snapshot()
        assert [name[-5:] for name in odd.files] == ["one", "short"]
        assert odd.skipped == 6  # deep, tab, plain and linked, the folder with a new line, the long path
        again = await box.session("shell")
        await again.restore(odd)
        return await box.run(["bash", "-c", "mkdir $'a\nb'"]), await box.run(["bash", "-c", "touch one"])

    odd, plain = inside(act)
    assert (odd.truncated, plain.truncated) == (True, False)


def test_many_files_with_long_names_are_returned():
    program = "import os\nfor n in range(900): open(f'{n:03}' + chr(0x1F600) * 60, 'w').close()"
    limits = Limits(files_out=900)

    async def act(box):
        session = await box.session(limits=limits)
        await session.run(program)
        return await box.run(program, limits=limits), await session.snapshot()

    outcome, snapshot = inside(act)
    assert (len(outcome.files), len(snapshot.files), outcome.truncated) == (900, 900, False)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "a/", "new\nline", "x" * 600, "d/" * 33 + "x"]
)
def test_paths_outside_the_sandbox_are_rejected(path):
    with pytest.raises(UserError):
        run("", files={path: b""})


@pytest.mark.parametrize("given", [{"wall_s": 0}, {"memory_bytes": -1}, {"cpu_s": float("inf")}, {"files_out": -1}])
def test_invalid_limits_raise_error(given):
    with pytest.raises(UserError):
        Limits(**given)


@pytest.mark.parametrize("program", [[], [""], ["a\0b"]])
def test_empty_commands_are_rejected(program):
    with pytest.raises(UserError):
        run(program)


def test_missing_bubblewrap_raises_error_with_install_instructions(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "bwrap" else which(name))
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        run("print(1)")


def test_bubblewrap_without_namespaces_reports_the_reason(monkeypatch):
    which = shutil.which
    with a_folder() as folder:
        broken = folder / "bwrap"
        broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        broken.chmod(0o755)
        found = {"bwrap": str(broken)}
        monkeypatch.setattr(namespaces.shutil, "which", lambda name: found.get(name) or which(name))
        with pytest.raises(UserError, match=r"No permissions.*sysctl"):
            run("print(1)")


def test_bubblewrap_that_fails_after_its_start_reports_the_reason_and_the_requirements(monkeypatch):
    which = shutil.which
    program = """import os, sys
words = dict(zip(sys.argv, sys.argv[1:]))
os.write(int(words["--info-fd"]), b'{"child-pid": %d}' % os.getpid())
sys.exit("bwrap: Can't set hostname to box: Operation not permitted")
"""
    with a_folder() as folder:
        broken = folder / "bwrap"
        broken.write_text(f"#!{find_python('')}\n{program}")
        broken.chmod(0o755)
        found = {"bwrap": str(broken)}
        monkeypatch.setattr(namespaces.shutil, "which", lambda name: found.get(name) or which(name))
        with pytest.raises(WorldError, match=r"hostname.*in a container"):
            run("print(1)")


def test_missing_interpreter_is_named():
    with pytest.raises(UserError, match="no-python"):
        find_python("/no-python")
    with pytest.raises(UserError, match="absolute"):
        zygote_command(SandboxSettings(binds=("relative",)), find_python(""))
    with pytest.raises(UserError, match="/tmp:/shown"):
        zygote_command(SandboxSettings(binds=("/tmp",)), find_python(""))


def test_bound_folders_can_be_read_and_not_written():
    program = "import helper; print(helper.VALUE)\nopen('/shown/x', 'w')"
    with a_folder() as folder:
        (folder / "helper.py").write_text("VALUE = 42")
        settings = SandboxSettings(binds=(f"{folder}:/shown",), paths=("/shown",))
        outcome = inside(lambda box: box.run(program), settings, preload=("helper",))
        assert os.listdir(folder) == ["helper.py"]
    assert (outcome.text, outcome.exit) == ("42\n", 1)
    assert "Read-only" in outcome.error_text


def test_frames_round_trip_and_malformed_ones_are_rejected():
    for pack, read in ((pack_request, marshal.loads), (pack_response, json.loads)):
        frame = pack({"op": "run"}, [b"", b"abc"])
        text, body = frame_sizes(frame[:8])
        assert unpack_frame(read(frame[8 : 8 + text]), frame[8 + text :]) == ({"op": "run"}, [b"", b"abc"])
        assert body == 3
    for header in ({"sizes": [2]}, {"sizes": [4, -1]}, {"sizes": 3}, {}, [3], "sizes"):
        with pytest.raises(ValueError, match="sizes"):
            unpack_frame(header, b"abc")


def test_deeply_nested_frame_is_unreadable():
    async def act():
        ours, theirs = socket.socketpair()
        text = b"[" * 100_000
        ours.setblocking(False)
        theirs.sendall(struct.pack(">II", len(text), 0) + text)
        with ours, theirs:
            await SupervisorSocket(ours).receive(max_body=0)

    with pytest.raises(WorldError, match="invalid frame"):
        asyncio.run(act())


def test_supervisor_responses_are_json():
    told = {"a": [1, -2.5, True, None], "b": {'\u20ac"\n\x00': "\ud800 \\"}, "c": []}
    assert json.loads(as_json(told)) == told
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        as_json([b""])


def test_zygote_starts_without_slow_imports():
    """They are imported beforehand for later programs; the first one finds what its supervisor needs alone."""

    async def act(box):
        return await box.run("import sys; print(*sys.modules)")

    modules = set(inside(act, preload=()).text.split())
    assert modules & {"json", "re", "enum", "signal", "contextlib", "functools", "collections"} == set()
    assert {"ctypes", "site", "os"} <= modules


def decide(code: bytes, audit: int, number: int, *arguments: int) -> int:
    """What a filter answers to a call: a small interpreter of the few instructions that are used."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    steps, at, held = [struct.unpack_from("=HBBI", code, n) for n in range(0, len(code), 8)], 0, 0
    while True:
        kind, if_true, if_false, value = steps[at]
        at += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        else:
            met = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[kind]
            at += if_true if met else if_false


X86, ARM = 0xC000003E, 0xC00000B7
ALLOW, KILL, EPERM, EACCES, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x5000D, 0x50026


@pytest.mark.parametrize(
    ("machine", "audit", "call", "expected"),
    [
        ("x86_64", X86, (0,), ALLOW),
        ("x86_64", X86, (101,), EPERM),
        ("x86_64", X86, (447,), EPERM),
        ("x86_64", X86, (435,), ENOSYS),
        ("x86_64", X86, (41, 1, 1), ALLOW),
        ("x86_64", X86, (41, 2, 1), EACCES),
        ("x86_64", X86, (53, 1, 1), ALLOW),
        ("x86_64", X86, (53, 30, 1), EACCES),
        ("x86_64", X86, (54, 3, 1, 16), ALLOW),
        ("x86_64", X86, (54, 3, 1, 7), EPERM),
        ("x86_64", X86, (54, 3, 1, 33), EPERM),
        ("x86_64", X86, (56, 0x11), ALLOW),
        ("x86_64", X86, (56, 0x10000011), EPERM),
        ("x86_64", X86, (16, 0, 0x5412), EPERM),
        ("x86_64", X86, (16, 0, 0x1_0000_5412), EPERM),
        ("x86_64", X86, (16, 0, 0x5401), ALLOW),
        ("x86_64", X86, (302, 0, 7), ALLOW),
        ("x86_64", X86, (302, 1, 7), EPERM),
        ("x86_64", X86, (0x40000000 + 39,), KILL),
        ("x86_64", 0x40000003, (0,), KILL),
        ("aarch64", ARM, (63,), ALLOW),
        ("aarch64", ARM, (117,), EPERM),
        ("aarch64", ARM, (198, 10, 1), EACCES),
        ("aarch64", ARM, (199, 30, 1), EACCES),
        ("aarch64", ARM, (208, 3, 1, 8), EPERM),
        ("aarch64", ARM, (220, 0x20000), EPERM),
        ("aarch64", ARM, (261, 1, 7), EPERM),
        ("aarch64", X86, (63,), KILL),
    ],
)
def test_seccomp_filter_returns_the_expected_verdicts(machine, audit, call, expected):
    assert decide(seccomp_filter(machine), audit, *call) == expected


def test_unknown_architecture_has_no_seccomp_filter():
    with pytest.raises(UserError, match="riscv64"):
        seccomp_filter("riscv64")


HELD = """
import asyncio, sys
from ludus.sandbox import Limits, NamespacesSandbox

async def main():
    box = NamespacesSandbox()
    session = await box.session("shell")
    await session.run("sleep 100 &")
    running = asyncio.create_task(box.run("import time; time.sleep(100)", limits=Limits(wall_s=100)))
    print("ready", flush=True)
    await running

asyncio.run(main())
"""


def test_killed_host_process_takes_its_programs_with_it():
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout.readline() == "ready\n"
        inner = set()
        deadline = time.monotonic() + 60
        while len(inner) < 9:  # two of bubblewrap, zygote, supervisor and program each, and what sleeps
            assert time.monotonic() < deadline, inner
            inner = descendants() - before - {host.pid}
            time.sleep(0.02)
        host.kill()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in inner if os.path.exists(f"/proc/{pid}") and is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie that waits for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
