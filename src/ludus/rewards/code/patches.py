"""Similarity of a patch to the reference patch: SWE-RL (arXiv:2502.18449, section 2).

-1 if the answer is not a unified diff; otherwise the mean over all files of either patch of difflib's ratio
of their changes, 0 for a file that only one of them changes.
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
"""Maximum number of compared pairs of equal characters over all files. Files beyond it are compared line by
line, with the same maximum: together one or two seconds.
"""

_HUNK = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@.*")
_SECTION = re.compile(r"(@@ [^@]* @@).*")


@dataclass(frozen=True, slots=True)
class Patch:
    """Truth of a repair task: the reference patch, a unified diff."""

    diff: str


def read_patch(text: str) -> dict[str, str] | None:
    """Return the changes by file, each hunk with its header; None if the text is not a unified diff or is empty.

    The counts in the headers must match the lines.
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
    """Return the file's name after the change, or before it if the file is removed."""
    names = [re.sub(r"^[ab]/", "", line[4:].split("\t")[0].strip()) for line in (new, old)]
    return names[1] if names[0] == "/dev/null" else names[0]


def _hunk(lines: Sequence[str], start: int, old: int, new: int) -> list[str] | None:
    """Return the lines of a hunk from `start` on; None if they do not match its header or change nothing."""
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
    """Return the mean over the files of both patches of the ratio of their changes, in [0, 1]."""
    files = given.keys() | oracle.keys()
    work = _Work()
    ratios = [work.ratio(given[file], oracle[file]) for file in sorted(given.keys() & oracle.keys())]
    return sum(ratios) / len(files)


@dataclass(slots=True)
class _Work:
    """Remaining budget of comparisons."""

    of_characters: int = MAX_PAIRS
    of_lines: int = MAX_PAIRS

    def ratio(self, one: str, other: str) -> float:
        """Return difflib's ratio of the characters while the budget lasts, then of the lines."""
        if one == other:
            return 1.0
        matcher = _Matcher(one, other, autojunk=False, left=self.of_characters)
        ratio, self.of_characters = matcher.ratio(), max(matcher.left, 0)
        if matcher.left < 0:
            matcher = _Matcher(one.splitlines(), other.splitlines(), autojunk=True, left=self.of_lines)
            ratio, self.of_lines = matcher.ratio(), max(matcher.left, 0)
        return ratio


class _Matcher(difflib.SequenceMatcher[str]):
    """`SequenceMatcher` that stops matching after `left` comparisons; `left` is negative afterwards.

    Without the bound its time is cubic for texts with many short matches.
    """

    def __init__(self, one: Sequence[str], other: Sequence[str], *, autojunk: bool, left: int) -> None:
        super().__init__(None, one, other, autojunk)
        self.left = left
        places: dict[str, list[int]] = vars(self)["b2j"]
        self._pairs = [0, *accumulate(1 + len(places.get(item, ())) for item in one)]

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """Return the longest common run of both ranges, or an empty one if the budget is used up."""
        self.left -= self._pairs[-1 if ahi is None else ahi] - self._pairs[alo]
        return super().find_longest_match(alo, ahi, blo, bhi) if self.left >= 0 else difflib.Match(alo, blo, 0)


def patch_value(text: str, truth: Patch) -> float:
    """-1 where neither the text nor its only fenced block is a patch, else the `similarity`, in [0, 1]."""
    oracle = read_patch(truth.diff)
    if oracle is None:
        raise ValueError(f"the reference patch is not a unified diff: {truth.diff[:80]!r}")
    given = read_patch(text) or read_patch(fenced(text))
    return -1.0 if given is None else similarity(given, oracle)


def patch_similarity(read: Evidence = final_answer) -> RewardFunction:
    """Create a verifier: `patch_value` of the patch that `read` extracts."""

    def patch_likeness(task: Task, trajectory: Trajectory) -> float:
        return patch_value(read(trajectory), truth_of(task, Patch))

    return patch_likeness
