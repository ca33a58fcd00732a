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
from ludus.worlds.terminal.checks import Check, matches
from ludus.worlds.terminal.task import TerminalTask

NO_OUTPUT = "[no output]"
LIST = "find . -type f -not -path '*/.git*' | sort"
HEAD_LINES = 4
_SCRIPT = "/tmp/way.sh"


def solve(task: TerminalTask) -> list[Message]:
    """Return the messages of the task's solution."""
    return episode(task, task.steps)


def solve_partly(task: TerminalTask, rng: random.Random) -> list[Message]:
    """Return a flawed attempt, which only reads the files or omits the last command."""
    return episode(task, task.steps[:-1] if rng.random() < 0.5 else ())


def episode(task: TerminalTask, steps: Sequence[str]) -> list[Message]:
    """Return the messages of an episode that reads the files, runs these commands and ends."""
    messages: list[Message] = []
    for number, (command, output) in enumerate([*_inspections(task), *((step, NO_OUTPUT) for step in steps)]):
        messages += tool_turn(number, "shell", {"command": command}, output)
    tops = sorted({path.partition("/")[0] for path in task.start.files} - {".gitconfig"})
    return [*messages, assistant(f"Done with {', '.join(tops[:3]) or 'the script'}.")]


def _inspections(task: TerminalTask) -> Iterator[tuple[str, str]]:
    """Yield commands that read the files, each with its output."""
    files = task.start.files
    yield LIST, "\n".join(sorted(f"./{path}" for path in files if "/.git" not in f"/{path}")) or NO_OUTPUT
    for path in task.preview:
        head = files[path].decode().split("\n")[:HEAD_LINES]
        yield f"head -n {HEAD_LINES} {path}", "\n".join(head).rstrip("\n") or NO_OUTPUT


def alternative_steps(task: TerminalTask) -> Iterator[tuple[str, ...]]:
    """Yield other commands that solve the task: all steps as one script; the steps, then texts written differently."""
    steps = "\n".join(task.steps)
    yield (f"cat > {_SCRIPT} <<'END_OF_WAY'\n{steps}\nEND_OF_WAY", f"bash {_SCRIPT} && rm {_SCRIPT}")
    taken = tuple(pattern for one in task.command_checks for pattern in one.takes)
    texts = {
        str(check.arguments["path"]): equivalent_text(check) for check in task.file_checks if check.kind == "has_text"
    }
    written = [
        f"printf %s {shlex.quote(text)} > {shlex.quote(path)}"
        for path, text in texts.items()
        if text and not matches(path, taken)
    ]
    if written:
        yield (*task.steps, *written)


def equivalent_text(check: Check) -> str:
    """Return a text other than the expected one that the check `has_text` accepts; empty if there is none."""
    due = str(check.arguments["due"])
    lines = due.rstrip("\n").split("\n")
    match check.arguments["how"]:
        case "json":
            other = json.dumps(json.loads(due), indent=3, sort_keys=True)
        case "unordered":
            other = "\n".join(reversed(lines))
        case "lines":
            other = "\n".join([f"{lines[0]} ", *lines[1:]]) if lines[0] else ""
        case _:
            other = ""
    return other if other != due else ""
