"""Survey of a catalogue: tasks by package and by kind, and how many of them differ.

The shape of a solution is the edit without identifiers, texts and numbers. The baseline *no tool* answers without
changing a file, which is right if no test was broken when the task was mined; *majority* makes the most frequent repair
of the training tasks at the first possible place of the package, and is judged by the text of the repair.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ludus.worlds.swe.tasks import Bug, Catalogue

_WORD = re.compile(r"[A-Za-z_]\w*")
_KEPT = frozenset(keyword.kwlist)


def shape_of(bug: Bug) -> str:
    """Return the repair of a bug without identifiers, texts and numbers."""
    return f"{bug.edit.kind}: {blotted(bug.edit.new)} -> {blotted(bug.edit.old)}"


def blotted(text: str) -> str:
    """Return code without identifiers, texts and numbers."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "T", text)
    plain = _WORD.sub(lambda word: word[0] if word[0] in _KEPT else "n", plain)
    return " ".join(re.sub(r"\b\d[\d.]*\b", "0", plain).split())


def survey(catalogue: Catalogue) -> str:
    """Return three tables."""
    bugs = catalogue.bugs
    lines = [f"{'package':18} split       tasks  tests"]
    for package in catalogue.packages.values():
        count = sum(bug.package == package.name for bug in bugs)
        num = sum(map(len, package.tests.values()))
        lines.append(f"{package.name:18} {package.split:10} {count:6} {num:6}")
    lines += ["", *_counts("kind", bugs, lambda bug: bug.edit.kind), "", *_levels(catalogue)]
    return "\n".join(lines)


def _counts(title: str, bugs: Sequence[Bug], key: Callable[[Bug], str]) -> list[str]:
    found = Counter(key(bug) for bug in bugs)
    return [f"{title:18} tasks", *(f"{name:18} {count:5}" for name, count in found.most_common())]


def _levels(catalogue: Catalogue) -> list[str]:
    levels: dict[int, list[Bug]] = defaultdict(list)
    for bug in catalogue.bugs:
        levels[bug.level].append(bug)
    training = [bug for bug in catalogue.bugs if catalogue.packages[bug.package].split == "train"]
    repairs = Counter((bug.edit.new, bug.edit.old) for bug in training)
    most = next((repair for repair, _ in repairs.most_common(1)), None)
    lines = ["level  tasks  issues  shapes  no tool  majority (at most)"]
    for level, bugs in sorted(levels.items()):
        held = [bug for bug in bugs if catalogue.packages[bug.package].split != "train"]
        right = sum((bug.edit.new, bug.edit.old) == most for bug in held)
        share = f"{right / max(len(held), 1):.1%}"
        idle = f"{sum(not bug.broken for bug in bugs) / len(bugs):.1%}"
        issues, shapes = len({blotted(bug.issue) for bug in bugs}), len(set(map(shape_of, bugs)))
        lines.append(f"{level:5} {len(bugs):6} {issues:7} {shapes:7}  {idle:>7}  {share:>8}")
    return lines
