"""Backend without isolation: a child process with resource limits.

It protects only against accidents: programs can access everything that this user can, use the network, and
leave processes behind. Requires `unsafe`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome, RunsOnly, make_order
from ludus.sandbox.guest.files import collect, put
from ludus.sandbox.guest.kernel import ResourceBounds
from ludus.sandbox.local.run_process import ProcessResult, ProcessRun

_LAUNCH = """
import json, os, resource, sys
for kind, value in json.loads(sys.argv[1]):
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error}", file=sys.stderr)
    os._exit(127)
"""


@dataclass(eq=False)
class ProcessSandbox(RunsOnly):
    """The process backend. `unsafe` must be set explicitly."""

    unsafe: bool = False
    name: str = field(default="process", init=False)

    def __post_init__(self) -> None:
        if not self.unsafe:
            raise UserError(
                "The process backend has no isolation: programs have all of your access rights.",
                "Use the namespaces backend, or set sandbox.unsafe = true if every program is trusted.",
            )

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run in a temporary folder. Raises UserError and WorldError as in the protocol."""
        order = make_order(program, files, stdin, limits)
        with tempfile.TemporaryDirectory(prefix="ludus-process-") as name:
            box, given = Path(name, "box"), dict(order.files)
            box.mkdir()
            put(given, set(), str(box))
            argv = order.argv
            if order.source is not None:
                main = Path(name, "main.py")
                main.write_bytes(order.source.encode("utf-8", "surrogatepass"))
                argv = (sys.executable, "-s", str(main))
            words = [sys.executable, "-I", "-S", "-c", _LAUNCH, json.dumps(_resources(order.limits)), *argv]
            environment = {"PATH": os.defpath, "HOME": str(box), "LANG": "C.UTF-8", "PYTHONPATH": str(box)}
            job = ProcessRun(words, str(box), environment, order.limits.wall_s, order.limits.output_bytes)
            try:
                done = await job.run(order.stdin)
            except OSError as error:
                raise WorldError(f"A process cannot be started: {error}.") from error
            made = collect(ResourceBounds(asdict(order.limits)), given, str(box))
        return outcome_of_child(done, made.files, made.cut or made.left_out > 0, order.source is not None)


def _resources(limits: Limits) -> list[tuple[int, int]]:
    """Return the limits per process. Their number is not limited, since the kernel counts all of a user's."""
    return [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, int(limits.cpu_s) + 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ]


def outcome_of_child(done: ProcessResult, files: Mapping[str, bytes], cut: bool, is_python: bool) -> Outcome:
    """Convert a child's result to an outcome."""
    ended_by = os.WTERMSIG(done.status) if os.WIFSIGNALED(done.status) else None
    code = os.WEXITSTATUS(done.status) if ended_by is None else None
    return Outcome(
        stdout=done.stdout,
        stderr=done.stderr,
        exit=code,
        signal=ended_by,
        timed_out=done.timed_out or ended_by == signal.SIGXCPU,
        memory_exceeded=is_python and code == 1 and b"MemoryError" in done.stderr[-200:],
        truncated=done.left_out_bytes > 0 or cut,
        left_out_bytes=done.left_out_bytes,
        files=files,
        cpu_s=done.cpu_s,
        wall_s=done.wall_s,
        peak_memory_bytes=done.peak_memory_bytes,
    )
