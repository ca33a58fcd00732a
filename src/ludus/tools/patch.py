"""`apply_patch`: apply a unified diff to the files of a workspace atomically.

A hunk applies at its line number if its old lines match there, otherwise at the only other matching position.
Matching is exact: a hunk that does not match is rejected with a reason.

The library `unidiff` is not used: it accepts lines beyond a hunk's counts and headers without hunks, its errors
have no line numbers, and it takes a minute for 60,000 characters of "Binary file" or "diff --git".
"""

from __future__ import annotations

import difflib
import io
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from ludus.sandbox.base import Snapshot
from ludus.tools.base import Tool, ToolError, tool
from ludus.tools.files import path_of, text_of
from ludus.tools.workspace import Workspace

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
