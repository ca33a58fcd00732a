"""Tools to list, read, write, edit and search the files of a workspace.

Files are transferred as snapshots; no host path is opened. The model's search patterns run in the sandbox, which
stops them at a time limit.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from ludus.errors import UserError
from ludus.sandbox.base import Limits, Snapshot, validate_files
from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.tools.workspace import WAIT_S, Workspace

HOME: Final = "/box"
"""Path of a session's folder inside the sandbox."""
_MAX_SHOWN: Final = 100  # maximum number of lines in the output of a search, and of files in that of a list
_SEARCH_PROGRAM: Final = """
import json, re, sys
order = json.loads(sys.stdin.read())
pattern, found = re.compile(order["pattern"]), 0
for path in order["paths"]:
    for number, line in enumerate(open(path, encoding="utf-8", errors="replace"), 1):
        if pattern.search(line):
            found += 1
            if found <= order["most"]:
                print(f"{path}:{number}: {line.rstrip()[:300]}")
if found > order["most"]:
    print(f"[{found - order['most']} more lines]")
"""


def path_of(path: str) -> str:
    """Return the normalized path relative to the folder. Raises ToolError if it is outside."""
    inside = path.removeprefix(f"{HOME}/") if path.startswith(f"{HOME}/") else path
    try:
        validate_files({inside: b""})
    except UserError:
        raise ToolError(
            f"{path!r} is not a path in the working folder: use a relative path without .., at most 32 folders deep"
        ) from None
    return str(PurePosixPath(inside))


def text_of(files: Mapping[str, bytes], path: str) -> str:
    """Return a file as text. Raises ToolError, with similar names, if it is missing or not text."""
    if path not in files:
        name = PurePosixPath(path).name
        near = [known for known in sorted(files) if PurePosixPath(known).name == name]
        near = near or [known for known in sorted(files) if known.startswith(f"{path}/")]
        hint = f"Did you mean {', '.join(near[:3])}?" if near else f"There are {len(files)} files."
        raise ToolError(f"there is no file {path!r}. {hint}")
    try:
        return files[path].decode("utf-8")
    except UnicodeDecodeError:
        raise ToolError(f"{path} is no UTF-8 text ({len(files[path])} bytes)") from None


def lines_of(text: str, first: int, last: int | None) -> str:
    """Return lines `first` to `last` (from 1) with a heading unless they are all lines. Raises ToolError."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    end = len(lines) if last is None else min(last, len(lines))
    if not lines:
        return "[the file is empty]"
    if first < 1 or first > len(lines) or end < first:
        raise ToolError(f"there are no lines {first} to {last or 'the end'}: the file has {len(lines)}")
    if first == 1 and end == len(lines):
        return text
    return f"[lines {first} to {end} of {len(lines)}]\n" + "\n".join(lines[first - 1 : end])


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with `old` replaced. Raises ToolError unless it occurs exactly once."""
    if not old:
        raise ToolError("the text to replace is empty; write_file makes a new file")
    place = text.find(old)
    if place < 0:
        raise ToolError("the text to replace does not occur; it must be the same to the last space")
    if text.find(old, place + 1) >= 0:
        raise ToolError("the text to replace occurs more than once; give more of what stands around it")
    return text[:place] + new + text[place + len(old) :]


def files_tools(workspace: Workspace) -> tuple[Tool, ...]:
    """Create `list_files`, `read_file`, `write_file`, `edit_file` and `search_files` for a workspace."""
    return (*_reading(workspace), *_writing(workspace), _searching(workspace))


def _reading(workspace: Workspace) -> tuple[Tool, Tool]:
    async def list_files(pattern: str = "*") -> str:
        """List files of the working folder with their sizes in bytes.

        Args:
            pattern: which, such as `*.py` or `src/*`; * stands for any text.
        """
        held = await workspace.snapshot()
        names = [name for name in sorted(held.files) if _matches(name, pattern)]
        shown = [f"{name} ({len(held.files[name])})" for name in names[:_MAX_SHOWN]]
        more = [f"[{len(names) - _MAX_SHOWN} more files]"] if len(names) > _MAX_SHOWN else []
        odd = [f"[{held.skipped} files or folders of odd names, links or depth]"] if held.skipped else []
        return "\n".join(shown + more + odd) or "[no files]"

    async def read_file(path: str, first: int = 1, last: int | None = None) -> str:
        """Read a file, or some of its lines.

        Args:
            path: its path in the working folder.
            first: the first line to show, counted from 1.
            last: the last line to show; none is the end.
        """
        files = (await workspace.snapshot()).files
        return lines_of(text_of(files, path_of(path)), first, last)

    make = tool(timeout_s=workspace.timeout_s, traits=Traits(idempotent=True))
    return make(list_files), make(read_file)


def _writing(workspace: Workspace) -> tuple[Tool, Tool]:
    async def write_file(path: str, text: str) -> str:
        """Write a file, in place of what it held.

        Args:
            path: its path in the working folder; folders on the way are made.
            text: all that the file shall hold.
        """
        place = path_of(path)
        await workspace.write({place: text.encode("utf-8", "replace")})
        return f"wrote {place}"

    async def edit_file(path: str, old: str, new: str) -> str:
        """Replace a piece of a file by another. The piece must occur exactly once.

        Args:
            path: the file's path in the working folder.
            old: the piece as it stands in the file, with its spaces and line ends.
            new: what takes its place; empty removes the piece.
        """
        place = path_of(path)

        def edit(snapshot: Snapshot) -> Snapshot:
            text = replaced(text_of(snapshot.files, place), old, new)
            return replace(snapshot, files={**snapshot.files, place: text.encode("utf-8", "replace")})

        await workspace.change(edit)
        return f"edited {place}"

    write = tool(timeout_s=workspace.timeout_s, traits=Traits(idempotent=True))(write_file)
    return write, tool(timeout_s=workspace.timeout_s)(edit_file)


def _searching(workspace: Workspace) -> Tool:
    limits = Limits(wall_s=min(5.0, workspace.limits.wall_s), disk_bytes=workspace.limits.disk_bytes, files_out=0)

    async def search_files(pattern: str, files: str = "*") -> str:
        """Search the lines of files for a regular expression, in Python's notation.

        Args:
            pattern: the regular expression.
            files: which files, such as `*.py`; * stands for any text.
        """
        held = (await workspace.snapshot()).files
        paths = [name for name in sorted(held) if _matches(name, files)]
        order = json.dumps({"pattern": pattern, "paths": paths, "most": _MAX_SHOWN})
        outcome = await workspace.sandbox.run(
            _SEARCH_PROGRAM, files={name: held[name] for name in paths}, stdin=order.encode(), limits=limits
        )
        if outcome.timed_out:
            raise ToolError(f"the search took longer than {limits.wall_s:g} s; write a simpler pattern")
        if not outcome.ok:
            why = outcome.error_text.strip().rpartition("\n")[2]
            raise ToolError(f"the search failed: {why or 'its sandbox ended it'}")
        return outcome.text.rstrip("\n") or f"[no match in {len(paths)} files]"

    return tool(timeout_s=limits.wall_s + WAIT_S, traits=Traits(idempotent=True))(search_files)


def _matches(path: str, pattern: str) -> bool:
    plain = pattern.removeprefix(f"{HOME}/").removeprefix("./")
    return fnmatch.fnmatchcase(path, plain) or fnmatch.fnmatchcase(PurePosixPath(path).name, plain)
