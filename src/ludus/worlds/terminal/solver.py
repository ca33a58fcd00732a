"""Whoever knows shows it: a look at the files, the commands that do it, and a word that it is done.

What commands print is worked out here and not run (a test compares it with the shell).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.terminal.job import TerminalJob

NOTHING = "[no output]"
LIST = "find . -type f -not -path '*/.git*' | sort"
LOOK_LINES = 4


def solve(job: TerminalJob) -> list[Message]:
    """The messages of a solution."""
    return played(job, job.draft.steps)


def played(job: TerminalJob, steps: Sequence[str]) -> list[Message]:
    """The messages of an episode that looks and then does this."""
    calls = [*_looks(job), *((step, NOTHING) for step in steps)]
    return [*_played(calls), _done(job)]


def fall_short(job: TerminalJob, rng: random.Random) -> list[Message]:
    """A flawed solution: it only looks, or leaves the last command out."""
    steps = job.draft.steps[:-1] if rng.random() < 0.5 else ()
    return played(job, steps)


def _looks(job: TerminalJob) -> list[tuple[str, str]]:
    files = job.start.files
    listed = sorted(f"./{path}" for path in files if "/.git" not in f"/{path}")
    looks = [(LIST, "\n".join(listed) or NOTHING)]
    for path in job.draft.looks:
        head = files[path].decode().split("\n")[:LOOK_LINES]
        looks.append((f"head -n {LOOK_LINES} {path}", "\n".join(head).rstrip("\n") or NOTHING))
    return looks


def _played(calls: list[tuple[str, str]]) -> list[Message]:
    messages = []
    for number, (command, said) in enumerate(calls):
        function = FunctionCall(name="shell", arguments=json.dumps({"command": command}))
        call = MessageToolCall(id=f"call_{number}_0", type="function", function=function)
        messages.append(Message(role="assistant", content="", tool_calls=[call]))
        messages.append(Message(role="tool", content=said, tool_call_id=call["id"], name="shell"))
    return messages


def _done(job: TerminalJob) -> Message:
    tops = sorted({path.partition("/")[0] for path in job.start.files} - {".gitconfig"})
    return Message(role="assistant", content=f"Done with {', '.join(tops[:3]) or 'the script'}.")
