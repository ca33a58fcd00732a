"""Scripted solutions, correct alternatives to them, and flawed attempts.

The output of commands is computed without running them (a test compares it with the shell).
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator, Sequence

from ludus.envs.messages import assistant, tool_turn
from ludus.types import Message
from ludus.worlds.terminal.checks import Text, matches
from ludus.worlds.terminal.job import TerminalJob

NO_OUTPUT = "[no output]"
LIST = "find . -type f -not -path '*/.git*' | sort"
HEAD_LINES = 4
_SCRIPT = "/tmp/way.sh"


def solve(job: TerminalJob) -> list[Message]:
    """Return the messages of the task's solution."""
    return episode(job, job.draft.steps)


def solve_partly(job: TerminalJob, rng: random.Random) -> list[Message]:
    """Return a flawed attempt, which only looks at the files or leaves out the last command."""
    return episode(job, job.draft.steps[:-1] if rng.random() < 0.5 else ())


def episode(job: TerminalJob, steps: Sequence[str]) -> list[Message]:
    """Return the messages of an episode that looks at the files, runs these commands and ends."""
    messages: list[Message] = []
    for number, (command, output) in enumerate([*_looks(job), *((step, NO_OUTPUT) for step in steps)]):
        messages += tool_turn(number, "shell", {"command": command}, output)
    tops = sorted({path.partition("/")[0] for path in job.start.files} - {".gitconfig"})
    return [*messages, assistant(f"Done with {', '.join(tops[:3]) or 'the script'}.")]


def _looks(job: TerminalJob) -> Iterator[tuple[str, str]]:
    """Yield commands that look at the files, each with its output."""
    files = job.start.files
    yield LIST, "\n".join(sorted(f"./{path}" for path in files if "/.git" not in f"/{path}")) or NO_OUTPUT
    for path in job.draft.looks:
        head = files[path].decode().split("\n")[:HEAD_LINES]
        yield f"head -n {HEAD_LINES} {path}", "\n".join(head).rstrip("\n") or NO_OUTPUT


def alternative_steps(job: TerminalJob) -> Iterator[tuple[str, ...]]:
    """Yield other commands that solve the task: all steps as one script; the steps, then texts written differently."""
    steps = "\n".join(job.draft.steps)
    yield (f"cat > {_SCRIPT} <<'END_OF_WAY'\n{steps}\nEND_OF_WAY", f"bash {_SCRIPT} && rm {_SCRIPT}")
    taken = tuple(pattern for run in job.draft.runs for pattern in run.takes)
    texts = {
        check.path: other
        for check in job.draft.checks
        if isinstance(check, Text) and not matches(check.path, taken) and (other := equivalent_text(check))
    }
    if texts:
        written = (f"printf %s {shlex.quote(text)} > {shlex.quote(path)}" for path, text in texts.items())
        yield (*job.draft.steps, *written)


def equivalent_text(check: Text) -> str:
    """Return a text other than the expected one that the check accepts; empty if there is none."""
    lines = check.due.rstrip("\n").split("\n")
    match check.how:
        case "json":
            other = json.dumps(json.loads(check.due), indent=3, sort_keys=True)
        case "unordered":
            other = "\n".join(reversed(lines))
        case "lines":
            other = "\n".join([f"{lines[0]} ", *lines[1:]]) if lines[0] else ""
        case "bytes":
            other = ""
    return other if other != check.due else ""
