"""Tools to list, read, write, edit, search and patch the files of a workspace.

Files are transferred as snapshots; no host path is opened. The model's search patterns run in the sandbox, which
stops them at a time limit. A patch applies completely or not at all. A hunk applies at its line number if its old lines
match there exactly, otherwise at the only other matching position. The library `unidiff` is not used: it accepts lines
beyond a hunk's counts and headers without hunks, has no line numbers in errors, and is slow for many "diff --git"
lines.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Final

from ludus.errors import UserError
from ludus.sandbox.base import Limits, Snapshot, validate_files
from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.tools.workspace import WAIT_S, Workspace

HOME: Final = "/box"  # path of a session's folder inside the sandbox
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
    """Return lines `first` to `last` (from 1), with a heading unless these are all. Raises ToolError if none exist."""
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


_HUNK: Final = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_DEV_NULL: Final = "/dev/null"
_UNSUPPORTED: Final = ("GIT binary patch", "Binary files ", "rename from ", "copy from ")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Old and new lines, with line ends. `line` is a line number in the old file, from 1."""

    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """Hunks of one file. If `source` is None, the file is new; if `target` is None, it is removed."""

    source: str | None
    target: str | None
    hunks: tuple[Hunk, ...]

    def __str__(self) -> str:
        if self.source is None or self.target is None:
            return f"made {self.target}" if self.source is None else f"removed {self.source}"
        return f"changed {self.target}" if self.source == self.target else f"moved {self.source} to {self.target}"


def read_patch(patch: str) -> tuple[FilePatch, ...]:
    """Parse a unified diff. Raises ToolError with a message for the model if it is invalid."""
    lines = patch.split("\n")
    if lines[-1] == "":
        lines.pop()
    found: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith(_UNSUPPORTED):
            raise ToolError(f"line {at + 1}: patches that rename, copy or hold binary files are not applied")
        if lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            source, target = (n if n is None else path_of(n) for n in map(file_name, lines[at : at + 2]))
            hunks: list[Hunk] = []
            at += 2
            while at < len(lines) and lines[at].startswith("@@"):
                hunk, at = read_hunk(lines, at)
                hunks.append(hunk)
            if not hunks or (source is None and target is None):
                raise ToolError(f"line {at}: a file without a hunk (@@ -1,2 +1,3 @@)")
            found.append(FilePatch(source, target, tuple(hunks)))
        elif lines[at].startswith(("@@", "--- ")):
            raise ToolError(f"line {at + 1}: a hunk needs the lines `--- a/FILE` and `+++ b/FILE` before it")
        else:
            at += 1
    if not found:
        raise ToolError("this is not a unified diff: it begins with `--- a/FILE`, `+++ b/FILE` and `@@ -1,2 +1,3 @@`")
    return tuple(found)


def file_name(line: str) -> str | None:
    """Return the name in a line `--- a/FILE` or `+++ b/FILE`; None for /dev/null."""
    name = line[4:].split("\t")[0].strip()
    return None if name == _DEV_NULL else name[2:] if name.startswith(("a/", "b/")) else name


def read_hunk(lines: Sequence[str], at: int) -> tuple[Hunk, int]:
    """Parse the hunk whose header is line `at`; return it and the index after it. Raises ToolError."""
    head = _HUNK.match(lines[at])
    if head is None:
        raise ToolError(f"line {at + 1}: {lines[at]!r} is not a hunk header such as @@ -1,2 +1,3 @@")
    begin, counts = at, tuple(1 if head[n] is None else int(head[n]) for n in (2, 3))
    old: list[str] = []
    new: list[str] = []
    at += 1
    while at < len(lines) and (len(old), len(new)) != counts:
        sign, text = (lines[at][0], lines[at][1:]) if lines[at] else (" ", "")
        if sign not in " -+":
            break
        sides = {" ": (old, new), "-": (old,), "+": (new,)}[sign]
        at += 1
        no_newline = at < len(lines) and lines[at].startswith("\\")
        at += no_newline
        for side in sides:
            side.append(text if no_newline else f"{text}\n")
    if (len(old), len(new)) != counts:
        raise ToolError(
            f"line {begin + 1}: the hunk says {counts[0]} old and {counts[1]} new lines, "
            f"and has {len(old)} and {len(new)}"
        )
    return Hunk(int(head[1]), tuple(old), tuple(new)), at


def patched(text: str, hunks: Sequence[Hunk], path: str) -> str:
    """Return the text after all hunks. Raises ToolError for a hunk that does not match."""
    parts: list[str] = []
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n")[:-1])]
    if starts[-1] < len(text):
        starts.append(len(text))
    offset, shift = 0, 0  # characters processed, and line shift of the last hunk
    for number, hunk in enumerate(hunks, 1):
        old = "".join(hunk.old)
        line = hunk.line - bool(old) + shift
        place = starts[line] if 0 <= line < len(starts) else -1
        if place < offset or not _matches_lines(text, old, place):
            place = _find_offset(text, old, offset, f"hunk {number} of {path} (line {hunk.line})")
            shift += bisect_left(starts, place) - line
        parts += [text[offset:place], "".join(hunk.new)]
        offset = place + len(old)
    return "".join([*parts, text[offset:]])


def _matches_lines(text: str, old: str, place: int) -> bool:
    ends = old.endswith("\n") or not old or place + len(old) == len(text)
    return ends and text.startswith(old, place)


def _find_offset(text: str, old: str, offset: int, what: str) -> int:
    """Return the only matching offset of `old` from `offset` on. Raises ToolError unless there is exactly one."""
    if not old:
        raise ToolError(f"{what} adds lines at a place that the file does not have")
    places = [0] if offset == 0 and _matches_lines(text, old, 0) else []
    at = text.find(f"\n{old}", max(offset - 1, 0))
    while at >= 0 and len(places) < 2:
        places += [at + 1] if _matches_lines(text, old, at + 1) else []
        at = text.find(f"\n{old}", at + 1) if old.endswith("\n") else -1
    if len(places) == 1:
        return places[0]
    if places:
        raise ToolError(f"{what} fits at several places: correct its line number or give more context")
    raise ToolError(f"{what} does not fit: its lines are not in the file as they stand in the patch:\n{old[:500]}")


def patched_files(snapshot: Snapshot, patches: Sequence[FilePatch]) -> Snapshot:
    """Return the files after all patches. Raises ToolError; changes are never partial."""
    files, executable = dict(snapshot.files), set(snapshot.executable)
    for patch in patches:
        before = "" if patch.source is None else text_of(files, patch.source)
        name = patch.source or patch.target or ""
        if patch.target is not None and patch.target != patch.source and patch.target in files:
            raise ToolError(f"{patch.target} already exists, and the patch creates it")
        after = patched(before, patch.hunks, name)
        if patch.source is not None and patch.source != patch.target:
            del files[patch.source]
            if patch.source in executable:
                executable.remove(patch.source)
                executable |= {patch.target} if patch.target is not None else set()
        if patch.target is not None:
            files[patch.target] = after.encode("utf-8", "replace")
        elif after:
            raise ToolError(f"the patch removes {name}, and does not hold all of its lines")
    return Snapshot(files, frozenset(executable))


def unified_diff(path: str, before: str, after: str, new: bool = False) -> str:
    """Return the difference of two texts of a file as a unified diff; `new`: the patch creates the file."""
    old_lines, new_lines = list(io.StringIO(before)), list(io.StringIO(after))
    lines = difflib.unified_diff(old_lines, new_lines, _DEV_NULL if new else f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def apply_patch_tool(workspace: Workspace) -> Tool:
    """Create the tool `apply_patch(patch)` for the files of a workspace."""

    async def apply_patch(patch: str) -> str:
        """Apply a unified diff to files here: all of it or, where a part does not fit, nothing.

        Args:
            patch: the diff, with `--- a/FILE`, `+++ b/FILE` and `@@ -1,2 +1,3 @@`; /dev/null is no file.
        """
        patches = read_patch(patch)
        await workspace.change(lambda snapshot: patched_files(snapshot, patches))
        return "\n".join(map(str, patches))

    return tool(timeout_s=workspace.timeout_s)(apply_patch)
