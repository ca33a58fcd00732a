"""Similarity of a patch to the reference patch, as in SWE-RL (arXiv:2502.18449, section 2).

The reward is -1 if the answer is not a unified diff; otherwise the mean, over the files of both patches, of
difflib's ratio of the changes, which is 0 for a file that only one patch changes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, fenced_block, final_answer
from ludus.tools.base import ToolError
from ludus.tools.files import file_name, read_hunk
from ludus.types import Task, Trajectory

MAX_CHARACTERS = 400_000
"""Maximum characters of a patch; a longer one is invalid."""
MAX_PAIRS = 10_000_000
"""Maximum number of compared pairs of equal characters over all files (about a second); files beyond it are
compared line by line, with the same maximum."""

_SECTION = re.compile(r"(@@ [^@]* @@).*")


@dataclass(frozen=True, slots=True)
class Patch:
    """Truth of a repair task: the reference patch, a unified diff."""

    diff: str


def read_patch(text: str) -> dict[str, str] | None:
    """Return the changes by file, each hunk with its header; None if the text is not a unified diff or is empty.

    The line counts in the headers must match the hunks.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    path, at = "", 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            after = file_name(lines[at + 1])
            path = after if after is not None else file_name(line) or "/dev/null"
            at += 2
        elif path and line.startswith("@@"):
            try:
                _, end = read_hunk(lines, at)
            except ToolError:
                return None
            hunk = lines[at + 1 : end]
            if not any(line.startswith(("+", "-")) for line in hunk):
                return None
            found.setdefault(path, []).extend([_SECTION.sub(r"\1", line), *hunk])
            at = end
        elif path and line[:1] in ("+", "-", " ", "@") and line.rstrip() != "--":
            return None
        else:
            at += 1
    return {name: "\n".join(change) for name, change in found.items()} or None


def similarity(given: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    """Return the mean ratio of the changes over the files of both patches, in [0, 1]."""
    characters_left = lines_left = MAX_PAIRS
    ratios = []
    for one, other in ((given[file], oracle[file]) for file in sorted(given.keys() & oracle.keys())):
        if one == other:
            ratios.append(1.0)
            continue
        matcher = _Matcher(one, other, autojunk=False, left=characters_left)
        ratio, characters_left = matcher.ratio(), max(matcher.left, 0)
        if matcher.left < 0:
            matcher = _Matcher(one.splitlines(), other.splitlines(), autojunk=True, left=lines_left)
            ratio, lines_left = matcher.ratio(), max(matcher.left, 0)
        ratios.append(ratio)
    return sum(ratios) / len(given.keys() | oracle.keys())


class _Matcher(difflib.SequenceMatcher[str]):
    """`SequenceMatcher` that stops matching after `left` comparisons; `left` is negative afterwards.

    Without a bound its time is cubic for texts with many short matches.
    """

    def __init__(self, one: Sequence[str], other: Sequence[str], *, autojunk: bool, left: int) -> None:
        super().__init__(None, one, other, autojunk)
        self.left = left
        positions: dict[str, list[int]] = vars(self)["b2j"]
        self._pairs = [0, *accumulate(1 + len(positions.get(item, ())) for item in one)]

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """Return the longest common run of both ranges, or an empty one if the budget is used up."""
        self.left -= self._pairs[-1 if ahi is None else ahi] - self._pairs[alo]
        return super().find_longest_match(alo, ahi, blo, bhi) if self.left >= 0 else difflib.Match(alo, blo, 0)


def patch_value(text: str, truth: Patch) -> float:
    """Return -1 if neither the text nor its only fenced block is a patch, else the `similarity`, in [0, 1]."""
    oracle = read_patch(truth.diff)
    if oracle is None:
        raise ValueError(f"the reference patch is not a unified diff: {truth.diff[:80]!r}")
    given = read_patch(text) or read_patch(fenced_block(text))
    return -1.0 if given is None else similarity(given, oracle)


def patch_similarity(read: Evidence = final_answer) -> RewardFunction:
    """Create a verifier: `patch_value` of the patch that `read` extracts."""

    def patch_likeness(task: Task, trajectory: Trajectory) -> float:
        return patch_value(read(trajectory), truth_of(task, Patch))

    return patch_likeness
