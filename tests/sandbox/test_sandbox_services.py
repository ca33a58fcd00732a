"""Public execution services as backends, with fake servers that follow their documentation."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic import ValidationError

from ludus.config.sections.rollout import SandboxConfig
from ludus.envs.registry import sandbox_settings
from ludus.errors import UserError, WorldError
from ludus.sandbox import Limits, SandboxSettings, open_sandbox
from ludus.sandbox.remote.client import FusionSandbox, PistonSandbox
from ludus.worlds.code.grader import CodeGrader, CodeTruth, TestCase
from tiny_run import ludus, refused


def played(language, code, files, stdin, wall_s):
    """Run it here: exit code as a child has it, None past the clock."""
    with TemporaryDirectory() as name:
        for path, data in files.items():
            Path(name, path).write_bytes(data)
        words = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code]
        try:
            done = subprocess.run(
                words, cwd=name, input=stdin.encode(), capture_output=True, timeout=wall_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None, "", ""
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def fusion(asked):
    files = {path: base64.b64decode(data) for path, data in asked["files"].items()}
    code, out, error = played(asked["language"], asked["code"], files, asked["stdin"], asked["run_timeout"])
    assert asked["memory_limit_MB"] == 512
    if "no place" in asked["code"]:
        return 200, {"status": "SandboxError", "message": "no place left", "run_result": None}
    status = "TimeLimitExceeded" if code is None else "Finished"
    result = {"status": status, "return_code": code, "execution_time": 0.1, "stdout": out, "stderr": error}
    verdict = "Success" if code == 0 else "Failed"
    return 200, {"status": verdict, "message": "", "compile_result": None, "run_result": result, "files": {}}


def piston(asked):
    if asked["run_timeout"] > 60_000:
        return 400, {"message": "run_timeout cannot exceed the configured limit of 60000"}
    main, *others = asked["files"]
    assert main["encoding"] == "utf8"
    assert asked["run_memory_limit"] == 512 * 2**20
    if "no place" in main["content"]:
        return 500, {"message": "no place left"}
    files = {file["name"]: base64.b64decode(file["content"]) for file in others}
    code, out, error = played(asked["language"], main["content"], files, asked["stdin"], asked["run_timeout"] / 1000)
    killed = "SIGKILL" if code is None else None if code >= 0 else signal.Signals(-code).name
    run = {"stdout": out, "stderr": error, "code": None if killed else code, "signal": killed, "output": out}
    return 200, {"language": asked["language"], "version": "3.12.0", "run": run}


@contextmanager
def service(answer, token=""):
    """A service in a thread, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = not token or self.headers["Authorization"] == f"Bearer {token}"
            status, said = answer(asked) if known else (401, {"message": "who are you"})
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(backend, url, program, token="", **given):
    async def whole():
        sandbox = open_sandbox(SandboxSettings(backend=backend, url=url, token=token))
        try:
            return await sandbox.run(program, **given)
        finally:
            await sandbox.close()

    return asyncio.run(whole())


BOTH = pytest.mark.parametrize(("backend", "answer"), [("sandbox_fusion", fusion), ("piston", piston)])
FUSION_FIRST = pytest.mark.parametrize(
    ("backend", "answer"), [("sandbox_fusion", fusion), pytest.param("piston", piston, marks=pytest.mark.slow)]
)


@BOTH
def test_a_program_reads_files_and_stdin_and_returns_its_streams(backend, answer):
    program = "import sys; print(open('i').read(), sys.stdin.read(), 'ü'); sys.exit(5)"
    with service(answer) as url:
        outcome = ask(backend, url, program, files={"i": b"in"}, stdin=b"said")
        assert (outcome.text, outcome.exit, outcome.ok) == ("in said ü\n", 5, False)
        assert ask(backend, url, ["echo", "a b", "$HOME"]).text == "a b $HOME\n"


@FUSION_FIRST
def test_time_signals_memory_and_long_output_are_reported(backend, answer):
    with service(answer) as url:
        late = ask(backend, url, "while True: pass", limits=Limits(wall_s=0.3))
        assert (late.timed_out, late.exit, late.ok) == (True, None, False)
        killed = ask(backend, url, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        assert (killed.signal, killed.exit, killed.timed_out) == (signal.SIGSEGV, None, False)
        assert ask(backend, url, "raise MemoryError").memory_exceeded
        long = ask(backend, url, "print('x' * 5000 + 'END')", limits=Limits(output_bytes=1000))
        assert long.truncated
        assert len(long.stdout) <= 1000
        assert long.text.endswith("END\n")


@BOTH
def test_service_failure_is_reported_as_sandbox_failure_with_its_message(backend, answer):
    with service(answer) as url, pytest.raises(WorldError, match="no place left"):
        ask(backend, url, "print('no place')")
    with service(lambda _: (200, {"odd": 1})) as url, pytest.raises(WorldError, match="unreadable response"):
        ask(backend, url, "print(1)")
    with pytest.raises(WorldError, match="is unreachable"):
        ask(backend, "http://127.0.0.1:9", "print(1)")


@BOTH
def test_programs_are_graded_through_a_service(backend, answer):
    async def grade(url, program):
        sandbox = open_sandbox(SandboxSettings(backend=backend, url=url))
        cases = tuple(TestCase(f"t{i}", (i, 7), i + 7) for i in range(3))
        truth = CodeTruth(tuple(case.name for case in cases), entry="add", cases=cases)
        grading = await CodeGrader(sandbox, Limits()).grade(program, truth, cases)
        await sandbox.close()
        return [verdict.passed for verdict in grading.verdicts]

    with service(answer) as url:
        right = asyncio.run(grade(url, "def add(a, b):\n    return a + b"))
        assert right == [True] * 3
        assert asyncio.run(grade(url, "import os\nos._exit(0)")) == [False] * 3


def test_an_error_of_a_service_is_reported_with_its_message():
    with service(piston) as url, pytest.raises(UserError, match="cannot exceed the configured limit"):
        ask("piston", url, "print(1)", limits=Limits(wall_s=90))
    with service(fusion, token="secret") as url:
        assert ask("sandbox_fusion", url, "print(1)", token="secret").ok
        with pytest.raises(UserError, match="who are you"):
            ask("sandbox_fusion", url, "print(1)", token="wrong")
    with service(fusion) as url, pytest.raises(UserError, match="UTF-8"):
        ask("sandbox_fusion", url, "print(1)", stdin=b"\xff")


def honest(language, code, files, stdin, wall_s, memory_bytes):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({memory_bytes},) * 2)\n"
    return played(language, limit + code if language == "python" else code, files, stdin, wall_s)


def played_freely(language, code, files, stdin, wall_s, memory_bytes):
    return played(language, code, files, stdin, wall_s)


def careless(language, code, files, stdin, wall_s, memory_bytes):
    """Knows no bound on memory, and every program of it ends well."""
    done = played(language, code, files, stdin, wall_s)
    return done if done[0] is None else (0, *done[1:])


def checking(run, wants_fusion):
    """A service of either kind, by a function that runs programs."""

    def answer(asked):
        if wants_fusion:
            files = {path: base64.b64decode(data) for path, data in asked["files"].items()}
            given = (asked["code"], files, asked["stdin"], asked["run_timeout"])
            code, out, error = run(asked["language"], *given, asked["memory_limit_MB"] << 20)
            status = "TimeLimitExceeded" if code is None else "Finished"
            result = {"status": status, "return_code": code, "stdout": out, "stderr": error}
            return 200, {"status": "Success" if code == 0 else "Failed", "run_result": result}
        main, *others = asked["files"]
        files = {file["name"]: base64.b64decode(file["content"]) for file in others}
        given = (main["content"], files, asked["stdin"], asked["run_timeout"] / 1000)
        code, out, error = run(asked["language"], *given, asked["run_memory_limit"])
        killed = "SIGKILL" if code is None else None if code >= 0 else signal.Signals(-code).name
        return 200, {"run": {"stdout": out, "stderr": error, "code": code, "signal": killed}}

    return answer


@FUSION_FIRST
def test_sandbox_check_runs_programs_on_a_service_and_reports_its_limits(backend, answer):
    with service(checking(honest, answer is fusion)) as url:
        said = ludus("sandbox", "check", "--backend", backend, "--url", url)
    assert said.code == 0, said
    assert f"The {backend} backend runs programs at {url}, with Python 3." in said.out
    rows = dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", said.out))
    assert rows["files and standard input"] == "reach the program"
    assert rows["exit codes"] == "are reported"
    assert rows["wall clock limit"].startswith("stops a program with a limit of 1 s after 1.")
    assert rows["memory limit"] == "programs cannot allocate 512 MiB with a limit of 256"
    assert rows["returned files"].startswith("none")
    assert rows["sessions"].startswith("none: unusable for the terminal and swe")
    assert rows["separation of runs"] == "the next run sees files left in /tmp"
    assert "Not tested: whether the service isolates its machine" in said.out


@pytest.mark.slow
def test_service_unfit_for_graders_fails_its_check():
    with service(checking(careless, wants_fusion=True)) as url:
        said = refused("sandbox", "check", "--backend", "sandbox_fusion", "--url", url)
    assert "lacks properties that graders need: exit codes, memory limit" in said
    dead = refused("sandbox", "check", "--backend", "piston", "--url", "http://127.0.0.1:9", code=4)
    assert "is unreachable" in dead
    assert "needs the URL of its service" in refused("sandbox", "check", "--backend", "piston")
    assert "--url is the address of a service" in refused("sandbox", "check", "--url", "http://a")
    assert "cannot be served from here" in refused("sandbox", "serve", "--backend", "piston", "--url", "http://a")


@pytest.mark.parametrize("command", [["train", "--from-scratch"], ["eval"], ["env", "check"], ["env", "show"]])
def test_unreachable_service_is_reported_once_before_rollouts(command, tmp_path):
    verb, *options = command
    words = ["--sandbox.backend", "sandbox_fusion", "--sandbox.url", "http://127.0.0.1:9"]
    if verb != "env":
        words += ["--run.dir", str(tmp_path / "run")]
    place = [*command, "code"] if verb == "env" else [verb, "code", *options]
    said = refused(*place, *words, code=4)
    assert "The world 'code' runs programs, but its sandbox does not work." in said
    assert said.count("is unreachable") == 1
    assert "`ludus sandbox check --backend sandbox_fusion --url http://127.0.0.1:9` repeats this check." in said
    assert not list(tmp_path.rglob("checkpoints"))


def test_world_without_programs_needs_no_sandbox():
    words = ["--sandbox.backend", "sandbox_fusion", "--sandbox.url", "http://127.0.0.1:9"]
    assert ludus("env", "show", "guess", *words).code == 0
    assert ludus("env", "show", "math", "--env.settings.tool", "calculator", *words).code == 0


def test_world_with_sessions_is_rejected_if_the_sandbox_has_none():
    with service(checking(played_freely, wants_fusion=True)) as url:
        words = ["--sandbox.backend", "sandbox_fusion", "--sandbox.url", url]
        assert "This sandbox backend does not support sessions." in refused("env", "check", "terminal", *words)


def test_services_have_no_sessions_and_need_an_address(tmp_path):
    for backend in (FusionSandbox, PistonSandbox):
        with pytest.raises(UserError, match="does not support sessions"):
            asyncio.run(backend(SandboxSettings(url="http://127.0.0.1:9")).session())
        with pytest.raises(UserError, match="URL"):
            backend(SandboxSettings(url="127.0.0.1:9"))
    with pytest.raises(ValidationError, match=r"needs sandbox\.url"):
        SandboxConfig(backend="piston")
    (tmp_path / "token").write_text("secret\n")
    config = SandboxConfig(backend="piston", url="http://a", token_file=str(tmp_path / "token"))
    assert sandbox_settings(config).token == "secret"
