"""Tasks in git repositories: commit, undo, merge, search, clean up."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from generators.terminal.draw import VERBS, prose, text_of, words
from generators.terminal.git_write import IDENTITY, Repository, grow
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import (
    Check,
    git_branches,
    git_clean,
    git_commits,
    git_files,
    git_ref,
    git_subjects,
    has_text,
    only_files,
)
from ludus.worlds.terminal.task import TerminalTask


@dataclass(frozen=True)
class HistoryStory:
    """A repository with a short history on `main`, and names to use in a task."""

    git: Repository
    shas: list[str]
    subjects: list[str]
    paths: list[str]
    spare: list[str]

    @property
    def root(self) -> str:
        """The folder of the repository."""
        return self.git.root

    @property
    def past(self) -> tuple[str, ...]:
        """The subjects of `main`, newest first."""
        return tuple(reversed(self.subjects))


def subject_of(rng: random.Random) -> str:
    """Return a subject for a commit."""
    verb = rng.choice(VERBS)
    return f"{verb} the {' '.join(words(rng, 2))}"


def story_of(rng: random.Random, num: int = 4) -> HistoryStory:
    """Return a repository with `num` commits on `main`."""
    drawn = words(rng, 9)
    paths = [f"{drawn[1]}.txt", f"{drawn[2]}.txt", f"src/{drawn[3]}.txt"]
    history: list[tuple[str, Mapping[str, str]]] = [("Begin", {path: text_of(prose(rng, 6)) for path in paths})]
    history += [(f"{subject_of(rng)} {n}", {paths[n % 3]: text_of(prose(rng, 6))}) for n in range(num - 1)]
    git, shas = grow(drawn[0], history)
    return HistoryStory(git, shas, [subject for subject, _ in history], paths, drawn[4:])


def draft_of(
    story: HistoryStory,
    text: str,
    steps: tuple[str, ...],
    checks: tuple[Check, ...],
    work: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> TerminalTask:
    """Return a task in the repository, whose working tree and `.git` may change; other files may not."""
    files: dict[str, str | bytes] = {".gitconfig": IDENTITY, **story.git.files(work), **(more or {})}
    told = f"The folder {story.root} is a git repository with the branch {story.git.head} checked out. {text}"
    changes = (f"{story.root}/*",)
    run = tuple(step.replace("GIT", f"git -C {story.root}") for step in steps)
    return TerminalTask(told, files, run, checks, changes=changes)


def _first(rng: random.Random) -> TerminalTask:
    root, subject = words(rng, 1)[0], subject_of(rng)
    files = {f"{name}.txt": text_of(prose(rng, 3)) for name in words(rng, 3)}
    text = (
        f'Make the folder {root} a git repository whose branch is main, with all its files in one commit, "{subject}".'
    )
    checks = (
        git_branches(root, frozenset({"main"}), head="main"),
        git_subjects(root, "main", (subject,)),
        git_files(root, "main", files),
        git_clean(root),
    )
    there: dict[str, str | bytes] = {".gitconfig": IDENTITY, **{f"{root}/{path}": body for path, body in files.items()}}
    steps = (f'git init -q -b main {root} && git -C {root} add . && git -C {root} commit -q -m "{subject}"',)
    return TerminalTask(text, there, steps, checks)


def _changed(only_one: bool, rng: random.Random) -> TerminalTask:
    story, subject = story_of(rng), subject_of(rng)
    work, one, two = dict(story.git.tracked), story.paths[0], story.paths[1]
    work[one] += "a new last line\n"
    work[two] = "a new first line\n" + work[two]
    due = work if not only_one else {**story.git.tracked, one: work[one]}
    which = f"only the change of {one}" if only_one else "all that has changed"
    rest = f" The change of {two} stays in the file, uncommitted." if only_one else ""
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, *story.past)),
        git_files(story.root, "main", due),
        git_commits(story.root, "main", tuple(story.shas)),
        has_text(f"{story.root}/{two}", work[two], "bytes"),
    )
    steps = (f'GIT commit -q -m "{subject}" -- {one}' if only_one else f'GIT commit -q -a -m "{subject}"',)
    return draft_of(
        story, f'Files have changed. Commit {which} on main with the subject "{subject}".{rest}', steps, checks, work
    )


def _branched(rng: random.Random) -> TerminalTask:
    story = story_of(rng)
    name, back = story.spare[0], rng.randint(1, 2)
    sha = story.shas[-1 - back]
    text = (
        f"Make a branch {name} at the commit "
        f"{'before the last one' if back == 1 else 'two before the last one'} of main, "
        "and check it out. main stays where it is."
    )
    checks: tuple[Check, ...] = (
        git_ref(story.root, name, sha),
        git_ref(story.root, "main", story.shas[-1]),
        git_branches(story.root, frozenset({"main", name}), head=name),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"GIT checkout -q -b {name} main~{back}",), checks)


def _tagged(annotated: bool, rng: random.Random) -> TerminalTask:
    story = story_of(rng)
    place, tag = rng.randrange(1, 3), f"v{rng.randint(1, 9)}.{rng.randint(0, 9)}"
    sort = "an annotated tag" if annotated else "a lightweight tag"
    subject = story.subjects[place]
    command = f'GIT tag {"-a -m release " if annotated else ""}{tag} $(GIT log --format=%h --grep="^{subject}$")'
    text = f'Give the commit with the subject "{subject}" {sort} {tag}. Nothing else changes.'
    checks: tuple[Check, ...] = (
        git_ref(story.root, tag, story.shas[place], annotated),
        git_ref(story.root, "main", story.shas[-1]),
    )
    return draft_of(story, text, (command,), checks)


def _amended(rng: random.Random) -> TerminalTask:
    story, subject = story_of(rng), subject_of(rng)
    text = (
        f'The last commit of main has a bad subject. It shall be "{subject}"; its files and the commits before it stay.'
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, *story.past[1:])),
        git_files(story.root, "main", story.git.tracked),
        git_commits(story.root, "main", tuple(story.shas[:-1]), (story.shas[-1],)),
    )
    return draft_of(story, text, (f'GIT commit -q --amend -m "{subject}"',), checks)


def _reverted(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 5)
    place = rng.choice((2, 3))
    before, after = story.git.trees[story.shas[place - 1]], story.git.trees[story.shas[place]]
    now = story.git.tracked
    undone = {path: before[path] if after[path] != before[path] else text for path, text in now.items()}
    subject = story.subjects[place]
    text = (
        f'The commit "{subject}" was a mistake. Undo what it changed '
        "by one new commit on main (any subject); all commits "
        "stay in the history."
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", ("", *story.past)),
        git_files(story.root, "main", undone),
        git_commits(story.root, "main", tuple(story.shas)),
        git_clean(story.root),
    )
    steps = (f'GIT revert --no-edit $(GIT log --format=%h --grep="^{subject}$") > /dev/null',)
    return draft_of(story, text, steps, checks)


def _restored(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 4)
    gone, subject = story.paths[1], subject_of(rng)
    last = story.git.tracked[gone]
    left = {path: text for path, text in story.git.tracked.items() if path != gone}
    story.shas.append(story.git.commit(left, "Tidy up"))
    due = {**left, gone: last}
    text = (
        f"Once there was a file {gone}, and a commit removed it. "
        "Bring it back as it last was, by a commit on main with the "
        f'subject "{subject}".'
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, "Tidy up", *story.past)),
        git_files(story.root, "main", due),
        git_clean(story.root),
    )
    steps = (f"GIT checkout -q $(GIT log -1 --format=%h -- {gone})~1 -- {gone}", f'GIT commit -q -m "{subject}"')
    return draft_of(story, text, steps, checks)


def _as_before(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 5)
    path, tag, subject = story.paths[0], f"v{rng.randint(1, 9)}", subject_of(rng)
    story.git.tags[tag] = story.shas[0]
    due = {**story.git.tracked, path: story.git.trees[story.shas[0]][path]}
    text = (
        f"The file {path} was right at the tag {tag}. Commit on main, "
        f'with the subject "{subject}", that it is again as it was '
        "there; other files stay as they are now."
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, *story.past)),
        git_files(story.root, "main", due),
        git_ref(story.root, tag, story.shas[0]),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"GIT checkout -q {tag} -- {path}", f'GIT commit -q -m "{subject}"'), checks)


def _ignored(rng: random.Random) -> TerminalTask:
    story, subject = story_of(rng), subject_of(rng)
    ending = rng.choice((".log", ".tmp", ".cache"))
    files = {**story.git.tracked, f"a{ending}": "1\n", f"src/b{ending}": "2\n"}
    story.shas.append(story.git.commit(files, "Add all"))
    due = {**{path: text for path, text in files.items() if not path.endswith(ending)}, ".gitignore": f"*{ending}\n"}
    text = (
        f"Files ending in {ending} were committed by mistake. By one "
        f'commit on main with the subject "{subject}", stop tracking '
        f"them, and add a .gitignore whose only line is *{ending}. The files themselves stay in the folder."
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, "Add all", *story.past)),
        git_files(story.root, "main", due),
        has_text(f"{story.root}/a{ending}", "1\n"),
        has_text(f"{story.root}/src/b{ending}", "2\n"),
        git_clean(story.root),
    )
    steps = (
        f"GIT rm -q -r --cached '*{ending}'",
        f"echo '*{ending}' > {story.root}/.gitignore",
        f'GIT add .gitignore && GIT commit -q -m "{subject}"',
    )
    return draft_of(story, text, steps, checks)


def side_of(story: HistoryStory, name: str, at: int, changed: Mapping[str, str], num: int = 1) -> list[str]:
    """Create a branch with its own commits; return their hashes."""
    story.git.branch(name, story.shas[at])
    files, made = dict(story.git.trees[story.shas[at]]), list[str]()
    for n, (path, text) in enumerate(changed.items()):
        files = {**files, path: text}
        made.append(story.git.commit(files, f"Work on {name} {n}", name))
    assert len(made) >= num
    return made


def _merged(how: str, rng: random.Random) -> TerminalTask:
    """Merge a branch. `fast`: fast-forward; `true`: a merge commit; `squash`: one ordinary commit."""
    story, subject = story_of(rng), subject_of(rng)
    name, extra = story.spare[0], {f"{word}.txt": text_of(prose(rng, 2)) for word in story.spare[1:3]}
    made = side_of(story, name, -1 if how == "fast" else -2, extra)
    due = {**story.git.tracked, **extra}
    checks: list[Check] = [
        git_files(story.root, "main", due),
        git_clean(story.root),
        git_ref(story.root, name, made[-1]),
    ]
    if how == "fast":
        said, command = (
            f"Bring main to the tip of the branch {name}, without a merge commit.",
            f"GIT merge -q --ff-only {name}",
        )
        checks.append(git_ref(story.root, "main", made[-1]))
    elif how == "true":
        said = f'Merge the branch {name} into main by a merge commit with the subject "{subject}".'
        command = f'GIT merge -q --no-ff -m "{subject}" {name}'
        checks += [
            git_subjects(story.root, "main", (subject, *story.past)),
            git_commits(story.root, "main", (*story.shas, *made), num_parents=2),
        ]
    else:
        said = (
            f"Bring what the branch {name} changes into main as a "
            f'single ordinary commit with the subject "{subject}"; '
            f"the commits of {name} do not become part of main's history."
        )
        command = f'GIT merge -q --squash {name} > /dev/null 2>&1 && GIT commit -q -m "{subject}"'
        checks += [
            git_subjects(story.root, "main", (subject, *story.past)),
            git_commits(story.root, "main", tuple(story.shas), tuple(made), num_parents=1),
        ]
    return draft_of(story, said, (command,), tuple(checks))


def _conflict(how: str, rng: random.Random) -> TerminalTask:
    """A merge in which both sides changed a file: take one side, or the lines of both."""
    story = story_of(rng, 3)
    path, name, subject = story.paths[0], story.spare[0], subject_of(rng)
    base = story.git.tracked[path].splitlines()
    ours, theirs = [*base], [*base]
    ours[2], theirs[2] = prose(rng, 2)
    made = side_of(story, name, -1, {path: text_of(theirs)})
    story.shas.append(story.git.commit({**story.git.tracked, path: text_of(ours)}, "Change a line"))
    both = [*base[:2], ours[2], theirs[2], *base[3:]]
    due = {"ours": ours, "theirs": theirs, "both": both}[how]
    said = {
        "ours": "take the line of main",
        "theirs": f"take the line of {name}",
        "both": f"keep both lines, that of main first and that of {name} behind it",
    }[how]
    text = (
        f"Merge the branch {name} into main. Both have changed a "
        f"line of {path}: {said}. The merge commit has the subject "
        f'"{subject}".'
    )
    checks: tuple[Check, ...] = (
        git_files(story.root, "main", {**story.git.tracked, path: text_of(due)}),
        git_subjects(story.root, "main", (subject, "Change a line", *story.past)),
        git_commits(story.root, "main", (*story.shas, *made), num_parents=2),
        git_clean(story.root),
    )
    steps: tuple[str, ...] = (f"GIT merge -q {name} > /dev/null 2>&1 || true",)
    steps += (
        (f"sed -i -E '/^(<<<<<<<|=======|>>>>>>>)/d' {story.root}/{path}",)
        if how == "both"
        else (f"GIT checkout -q --{how} -- {path}",)
    )
    return draft_of(story, text, (*steps, f'GIT add {path} && GIT commit -q -m "{subject}"'), checks)


def _picked(rng: random.Random) -> TerminalTask:
    story = story_of(rng)
    name, extra = story.spare[0], {f"{word}.txt": text_of(prose(rng, 2)) for word in story.spare[1:4]}
    made = side_of(story, name, -2, extra)
    place = rng.randrange(3)
    path = list(extra)[place]
    subject = f"Work on {name} {place}"
    text = (
        f'Of the branch {name} only the commit "{subject}" is wanted '
        "on main: put it there as a new commit with the same subject."
    )
    checks: tuple[Check, ...] = (
        git_files(story.root, "main", {**story.git.tracked, path: extra[path]}),
        git_subjects(story.root, "main", (subject, *story.past)),
        git_ref(story.root, name, made[-1]),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"GIT cherry-pick {made[place][:10]} > /dev/null",), checks)


def _rebased(rng: random.Random) -> TerminalTask:
    story = story_of(rng)
    name, extra = story.spare[0], {f"{word}.txt": text_of(prose(rng, 2)) for word in story.spare[1:3]}
    made = side_of(story, name, 1, extra)
    subjects = (f"Work on {name} 1", f"Work on {name} 0", *story.past)
    text = (
        f"Rebase the branch {name} onto main, so that its two commits "
        "follow the last one of main. main itself stays, and is "
        "checked out at the end."
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, name, subjects),
        git_files(story.root, name, {**story.git.tracked, **extra}),
        git_commits(story.root, name, tuple(story.shas), tuple(made)),
        git_ref(story.root, "main", story.shas[-1]),
        git_branches(story.root, frozenset({"main", name}), head="main"),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"GIT rebase -q main {name} && GIT checkout -q main",), checks)


def _squashed(rng: random.Random) -> TerminalTask:
    num, subject = rng.choice((2, 3)), subject_of(rng)
    story = story_of(rng, 5)
    text = (
        f"Make the last {num} commits of main one, with the subject "
        f'"{subject}". The files stay as they are now, and so do the '
        "commits before."
    )
    checks: tuple[Check, ...] = (
        git_subjects(story.root, "main", (subject, *story.past[num:])),
        git_files(story.root, "main", story.git.tracked),
        git_commits(story.root, "main", tuple(story.shas[:-num]), tuple(story.shas[-num:])),
        git_clean(story.root),
    )
    steps = (f'GIT reset -q --soft HEAD~{num} && GIT commit -q -m "{subject}"',)
    return draft_of(story, text, steps, checks)


def _moved(rng: random.Random) -> TerminalTask:
    num = rng.choice((1, 2))
    story = story_of(rng, 5)
    name = story.spare[0]
    text = (
        f"The last {'commit' if num == 1 else 'two commits'} of main should have been made on a branch of "
        f"{'its' if num == 1 else 'their'} own. Let a new branch "
        f"{name} have {'it' if num == 1 else 'them'}, take "
        f"{'it' if num == 1 else 'them'} away from main, and check {name} out."
    )
    checks: tuple[Check, ...] = (
        git_ref(story.root, name, story.shas[-1]),
        git_ref(story.root, "main", story.shas[-1 - num]),
        git_branches(story.root, frozenset({"main", name}), head=name),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"GIT checkout -q -b {name} && GIT branch -q -f main main~{num}",), checks)


def _pruned(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 5)
    merged, others = story.spare[:2], story.spare[2:4]
    for place, name in enumerate(merged):
        story.git.branch(name, story.shas[place + 1])
    kept = [
        git_ref(story.root, name, side_of(story, name, place, {f"{name}.txt": "open\n"})[-1])
        for place, name in enumerate(others)
    ]
    text = "Delete all branches whose commits are all in main, but not main. Branches with commits of their own stay."
    checks: tuple[Check, ...] = (
        git_branches(story.root, frozenset({"main", *others}), head="main"),
        git_ref(story.root, "main", story.shas[-1]),
        *kept,
    )
    steps = (("GIT branch --merged main --format='%(refname:short)' | grep -vx main | xargs git -C ROOT branch -q -d"),)
    return draft_of(story, text, tuple(step.replace("ROOT", story.root) for step in steps), checks)


def _renamed(rng: random.Random) -> TerminalTask:
    story = story_of(rng)
    old, new = story.spare[:2]
    made = side_of(story, old, -2, {f"{old}.txt": "open\n"})
    text = f"Rename the branch {old} to {new} and the branch main to trunk. trunk stays checked out."
    checks: tuple[Check, ...] = (
        git_branches(story.root, frozenset({"trunk", new}), head="trunk"),
        git_ref(story.root, new, made[-1]),
        git_ref(story.root, "trunk", story.shas[-1]),
    )
    return draft_of(story, text, (f"GIT branch -m {old} {new} && GIT branch -m main trunk",), checks)


def _exported(rng: random.Random) -> TerminalTask:
    story = story_of(rng, 5)
    tag, out = f"v{rng.randint(1, 9)}", f"{story.spare[1]}-release"
    story.git.tags[tag] = story.shas[1]
    due = {f"{out}/{path}": text for path, text in story.git.trees[story.shas[1]].items()}
    text = (
        f"Put the files as they were at the tag {tag} into a new "
        f"folder {out} beside the repository, without a .git. The "
        "repository itself, its working tree too, stays as it is."
    )
    checks: tuple[Check, ...] = (
        only_files(f"{out}/*", frozenset(due)),
        *(has_text(path, body, "bytes") for path, body in due.items()),
        git_ref(story.root, "main", story.shas[-1]),
        git_branches(story.root, frozenset({"main"}), head="main"),
        git_clean(story.root),
    )
    return draft_of(story, text, (f"mkdir {out} && GIT archive {tag} | tar -x -C {out}",), checks)


def _lost(rng: random.Random) -> TerminalTask:
    """Restore commits that are in no branch; the reflog is missing, the objects exist."""
    story = story_of(rng)
    name, extra = story.spare[0], {f"{word}.txt": text_of(prose(rng, 2)) for word in story.spare[1:3]}
    made = side_of(story, name, -1, extra)
    del story.git.branches[name]
    text = (
        f"The branch {name} was deleted by mistake, and with it two "
        "commits on top of main's last one. They are still in the "
        f"repository. Make the branch {name} again, at the newer of them; main stays checked out."
    )
    checks: tuple[Check, ...] = (
        git_ref(story.root, name, made[-1]),
        git_ref(story.root, "main", story.shas[-1]),
        git_branches(story.root, frozenset({"main", name}), head="main"),
    )
    steps = (f"GIT branch {name} $(GIT fsck --no-reflogs 2>/dev/null | awk '$1==\"dangling\" {{print $3}}')",)
    return draft_of(story, text, steps, checks)


MAKERS: Final = (
    TaskMaker("git/first", 1, _first),
    TaskMaker("git/commit", 1, partial(_changed, False)),
    TaskMaker("git/branch", 1, _branched),
    TaskMaker("git/tag", 1, partial(_tagged, False)),
    TaskMaker("git/amend", 1, _amended),
    TaskMaker("git/rename", 1, _renamed),
    TaskMaker("git/commit_one", 2, partial(_changed, True)),
    TaskMaker("git/annotated", 2, partial(_tagged, True)),
    TaskMaker("git/merge_fast", 2, partial(_merged, "fast")),
    TaskMaker("git/merge_true", 2, partial(_merged, "true")),
    TaskMaker("git/revert", 2, _reverted),
    TaskMaker("git/as_before", 2, _as_before),
    TaskMaker("git/pick", 2, _picked),
    TaskMaker("git/restore", 3, _restored),
    TaskMaker("git/ignore", 3, _ignored),
    TaskMaker("git/merge_squash", 3, partial(_merged, "squash"), held_out=True),
    TaskMaker("git/prune", 3, _pruned),
    TaskMaker("git/export", 3, _exported),
    TaskMaker("git/squash", 3, _squashed),
    TaskMaker("git/move", 3, _moved, held_out=True),
    TaskMaker("git/conflict_ours", 3, partial(_conflict, "ours")),
    TaskMaker("git/conflict_theirs", 3, partial(_conflict, "theirs")),
    TaskMaker("git/conflict_both", 4, partial(_conflict, "both")),
    TaskMaker("git/rebase", 4, _rebased),
    TaskMaker("git/lost", 4, _lost),
)
