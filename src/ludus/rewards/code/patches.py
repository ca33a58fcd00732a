"""Patches by their likeness to the one that was applied: SWE-RL (arXiv:2502.18449, section 2).

-1 for what is no unified diff; else the mean over all files of either patch of difflib's ratio of their
changes, 0 for a file that only one of them changes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, fenced, final_answer
from ludus.types import Task, Trajectory

MAX_CHARACTERS = 400_000
"""A longer patch is of the wrong format."""
MAX_PAIRS = 10_000_000
"""Pairs of equal characters that are looked at, over all files. Files for which that is too few are compared
line by line, with as many pairs of equal lines: together a second or two."""

_HUNK = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@.*")
_SECTION = re.compile(r"(@@ [^@]* @@).*")


@dataclass(frozen=True, slots=True)
class Patch:
    """The truth of a task of mending code: the patch that was applied, a unified diff."""

    diff: str


def read_patch(text: str) -> dict[str, str] | None:
    """The changes by file, each hunk with its header; None for what is no unified diff or changes nothing.

    The counts in the headers have to be those of the lines.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    path, at = "", 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            path = _path(line, lines[at + 1])
            at += 2
        elif path and (header := _HUNK.fullmatch(line)):
            hunk = _hunk(lines, at + 1, *(int(count or 1) for count in header.groups()))
            if hunk is None:
                return None
            found.setdefault(path, []).extend([_SECTION.sub(r"\1", line), *hunk])
            at += 1 + len(hunk)
        elif path and line[:1] in ("+", "-", " ", "@") and line.rstrip() != "--":
            return None
        else:
            at += 1
    return {name: "\n".join(change) for name, change in found.items()} or None


def _path(old: str, new: str) -> str:
    """The file's name after the change; that before it for one that goes."""
    names = [re.sub(r"^[ab]/", "", line[4:].split("\t")[0].strip()) for line in (new, old)]
    return names[1] if names[0] == "/dev/null" else names[0]


def _hunk(lines: Sequence[str], start: int, old: int, new: int) -> list[str] | None:
    """The lines from `start` on that a header announces; None where others stand there or nothing changes."""
    taken: list[str] = []
    for place in range(start, len(lines)):
        line = lines[place]
        if old <= 0 and new <= 0 and not line.startswith("\\"):
            break
        kind = line[:1] or " "
        if kind not in "+- \\":
            return None
        old -= kind in "- "
        new -= kind in "+ "
        taken.append(line)
    changes = any(line[:1] in ("+", "-") for line in taken)
    return taken if old == new == 0 and changes else None


def similarity(given: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    """Mean over the files of both of the ratio of their changes, in [0, 1]."""
    files = given.keys() | oracle.keys()
    work = _Work()
    ratios = [work.ratio(given[file], oracle[file]) for file in sorted(given.keys() & oracle.keys())]
    return sum(ratios) / len(files)


@dataclass(slots=True)
class _Work:
    """How many pairs may still be looked at."""

    of_characters: int = MAX_PAIRS
    of_lines: int = MAX_PAIRS

    def ratio(self, one: str, other: str) -> float:
        """difflib's ratio: of the characters as long as there are pairs left, then of the lines."""
        if one == other:
            return 1.0
        matcher = _Matcher(one, other, autojunk=False, left=self.of_characters)
        ratio, self.of_characters = matcher.ratio(), max(matcher.left, 0)
        if matcher.left < 0:
            matcher = _Matcher(one.splitlines(), other.splitlines(), autojunk=True, left=self.of_lines)
            ratio, self.of_lines = matcher.ratio(), max(matcher.left, 0)
        return ratio


class _Matcher(difflib.SequenceMatcher[str]):
    """difflib's, but that it finds nothing more once it looked at `left` pairs: `left` is negative then.

    Its time is with the cube of the length for texts that agree in many short pieces.
    """

    def __init__(self, one: Sequence[str], other: Sequence[str], *, autojunk: bool, left: int) -> None:
        super().__init__(None, one, other, autojunk)
        self.left = left
        places: dict[str, list[int]] = vars(self)["b2j"]
        self._pairs = [0, *accumulate(1 + len(places.get(item, ())) for item in one)]

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """The longest run that both ranges have; an empty one where nothing is left."""
        self.left -= self._pairs[-1 if ahi is None else ahi] - self._pairs[alo]
        return super().find_longest_match(alo, ahi, blo, bhi) if self.left >= 0 else difflib.Match(alo, blo, 0)


def patch_value(text: str, truth: Patch) -> float:
    """-1 where neither the text nor its only fenced block is a patch, else the `similarity`, in [0, 1]."""
    oracle = read_patch(truth.diff)
    if oracle is None:
        raise ValueError(f"the oracle patch is no unified diff: {truth.diff[:80]!r}")
    given = read_patch(text) or read_patch(fenced(text))
    return -1.0 if given is None else similarity(given, oracle)


def patch_similarity(read: Evidence = final_answer) -> RewardFunction:
    """A verifier: `patch_value` of the patch that `read` gives."""

    def patch_likeness(task: Task, trajectory: Trajectory) -> float:
        return patch_value(read(trajectory), truth_of(task, Patch))

    return patch_likeness
