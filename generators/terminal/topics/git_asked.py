"""Questions about the history of a git repository, which must not change."""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

from generators.terminal.draw import PEOPLE, prose, text_of, words
from generators.terminal.makers import TaskMaker
from generators.terminal.topics.git import HistoryStory, draft_of, side_of, story_of, subject_of

from ludus.worlds.terminal.checks import Check, git_branches, git_ref, has_text
from ludus.worlds.terminal.task import TerminalTask


def _answered(
    rng: random.Random, story: HistoryStory, ask: str, due: list[str], command: str, how: str = ""
) -> TerminalTask:
    """Return a question about a history; the answer goes to a file outside the repository, which must not change."""
    out = f"{rng.choice(story.spare)}-answer.txt"
    checks: tuple[Check, ...] = (
        has_text(out, text_of(due)),
        git_ref(story.root, "main", story.shas[-1]),
        git_branches(story.root, frozenset(story.git.branches), head="main"),
    )
    text = f"Write to {out}, beside the repository, {ask} Do not change the repository.{how}"
    return draft_of(story, text, (f"{command} > {out}",), checks)


def _introduced(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 2)
    path, word = story.paths[0], f"{story.spare[0]}{rng.randint(10, 99)}"
    files, due = dict(story.git.tracked), ""
    start = rng.randint(2, 4)
    for n in range(7):
        line = f"{word} {n}" if n >= start else prose(rng, 1)[0]
        files = {**files, path: text_of([line, *prose(rng, 2)])}
        subject = f"{subject_of(rng)} {n}"
        story.shas.append(story.git.commit(files, subject))
        due = subject if n == start else due
    ask = f'the subject of the commit that brought the word "{word}" into {path}.'
    command = f"GIT log --format=%s --reverse -S{word} -- {path} | head -n 1"
    return _answered(rng, story, ask, [due], command)


def _authors(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 1)
    people, files = rng.sample(PEOPLE, 4), dict(story.git.tracked)
    counts: Counter[str] = Counter({"Ada Abel": 1})
    for n in range(12):
        person = rng.choice(people)
        files = {**files, story.paths[0]: f"{n}\n"}
        name = f"{person.title()} Moreau"
        counts[name] += 1
        story.shas.append(story.git.commit(files, f"Step {n}", author=f"{name} <{person}@example.com>"))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ask = (
        "for each author of main a line with the number of commits, "
        "a blank and the name, the most commits first, equal ones "
        "from A to Z."
    )
    command = "GIT log --format=%an | sort | uniq -c | awk '{print $1, $2, $3}' | sort -k1,1nr -k2"
    return _answered(rng, story, ask, [f"{count} {name}" for name, count in ranked], command)


def _changelog(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 7)
    one, two = sorted(rng.sample(range(4), 2))
    two += 3
    story.git.tags |= {"v1.0": story.shas[one], "v2.0": story.shas[two]}
    due = [f"- {subject}" for subject in story.subjects[one + 1 : two + 1]]
    ask = (
        "the subjects of the commits after the tag v1.0 up to and "
        "with the tag v2.0, the oldest first, each line with a hyphen "
        "and a blank in front."
    )
    return _answered(rng, story, ask, due, "GIT log --reverse --format='- %s' v1.0..v2.0")


def _touched(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 8)
    name = story.spare[0]
    side_of(story, name, 3, {story.paths[2]: "new\n", f"{story.spare[1]}.md": "new\n"})
    due = sorted([story.paths[2], f"{story.spare[1]}.md"])
    ask = f"the paths of the files that the branch {name} has changed or added since it left main, from A to Z."
    return _answered(rng, story, ask, due, f"GIT diff --name-only main...{name} | sort")


def _hotspots(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 1)
    files, counts = dict(story.git.tracked), Counter(story.paths)
    for n in range(14):
        path = rng.choice(story.paths)
        counts[path] += 1
        files = {**files, path: f"{n}\n"}
        story.shas.append(story.git.commit(files, f"Step {n}"))
    if len(set(counts.values())) < len(counts):
        return _hotspots(rng)
    ask = "for each file the number of commits of main that added or changed it, a blank and its path, the most first."
    command = "GIT log --format= --name-only | sort | uniq -c | awk 'NF>1 {print $1, $2}' | sort -nr"
    return _answered(rng, story, ask, [f"{n} {path}" for path, n in counts.most_common()], command)


def _bisected(rng: random.Random) -> TerminalTask:
    """Find the commit that broke a check in the repository."""
    story = story_of(rng, 1)
    config = f"{story.spare[0]}.conf"
    limit, bad = rng.randint(20, 60), rng.randint(4, 9)
    test = f"#!/bin/sh\n[ \"$(awk -F= '{{s+=$2}} END {{print s}}' {config})\" -le {limit} ]\n"
    files = {**story.git.tracked, "check.sh": test}
    due, keys = "", words(rng, 4)
    for n in range(12):
        total = limit - rng.randint(0, 9) if n < bad else limit + 1 + rng.randint(0, 9)
        parts = sorted(rng.sample(range(1, total), 3))
        values = [b - a for a, b in zip([0, *parts], [*parts, total], strict=True)]
        files[config] = text_of([f"{key}={value}" for key, value in zip(keys, values, strict=True)])
        files = {**files, story.paths[0]: f"{n}\n"}
        subject = f"{subject_of(rng)} {n}"
        story.shas.append(story.git.commit(files, subject))
        due = subject if n == bad else due
    ask = (
        "the subject of the first commit at which `sh check.sh`, run "
        "in the repository, fails; it succeeds at all commits since "
        "check.sh is there and before that one. At the end the branch main is checked out as it is now."
    )
    command = (
        "GIT log --reverse --format=%h main -- check.sh "
        f"{config} | while read -r c; do GIT checkout -q $c; (cd {story.root} && sh check.sh) || "
        "{ GIT log -1 --format=%s; break; }; done"
    )
    drawn = _answered(rng, story, ask, [due], command)
    end = f"git -C {story.root} checkout -q main"
    return TerminalTask(drawn.text, drawn.files, (*drawn.steps, end), drawn.file_checks, changes=drawn.changes)


MAKERS: Final = (
    TaskMaker("git/authors", 2, _authors),
    TaskMaker("git/changelog", 2, _changelog),
    TaskMaker("git/touched", 3, _touched),
    TaskMaker("git/introduced", 3, _introduced),
    TaskMaker("git/hotspots", 3, _hotspots),
    TaskMaker("git/bisect", 4, _bisected),
)
