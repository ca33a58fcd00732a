"""Right episodes that are not the oracle's: other commands, and files in another writing that is as right."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from ludus.worlds.terminal.checks import Text, fits
from ludus.worlds.terminal.job import TerminalJob

_SCRIPT = "/tmp/way.sh"


def other_ways(job: TerminalJob) -> Iterator[tuple[str, ...]]:
    """Commands that solve the task: one script for all of it; the steps, then texts in another writing."""
    steps = "\n".join(job.draft.steps)
    yield (f"cat > {_SCRIPT} <<'END_OF_WAY'\n{steps}\nEND_OF_WAY", f"bash {_SCRIPT} && rm {_SCRIPT}")
    taken = tuple(pattern for run in job.draft.runs for pattern in run.takes)
    texts = {
        check.path: other
        for check in job.draft.checks
        if isinstance(check, Text) and not fits(check.path, taken) and (other := other_writing(check))
    }
    if texts:
        written = (f"printf %s {shlex.quote(text)} > {shlex.quote(path)}" for path, text in texts.items())
        yield (*job.draft.steps, *written)


def other_writing(check: Text) -> str:
    """A text that a check accepts and that is not the one that is due; empty where there is none."""
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
