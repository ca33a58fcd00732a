"""Tasks about files: sort, rename, remove, compare, merge."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from generators.terminal.draw import folder, names, prose, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import Check, has_text, only_executable, only_files
from ludus.worlds.terminal.task import TerminalTask

ENDINGS: Final = (".txt", ".csv", ".md", ".log", ".dat")


def _lot(rng: random.Random, num: int = 0) -> tuple[str, dict[str, str]]:
    """Return a folder of small text files of different sizes, some in subfolders."""
    root, num = folder(rng), num or rng.randint(8, 12)
    inner = ["", "", *(f"{word}/" for word in words(rng, 2))]
    found: dict[str, str] = {}
    for place, name in enumerate(names(rng, num)):
        ending = ENDINGS[place % 4] if place < 8 else rng.choice(ENDINGS)
        text = text_of(prose(rng, rng.randint(1, 9)))
        while len(text) in {len(other) for other in found.values()}:
            text += "end\n"
        found[f"{root}/{rng.choice(inner)}{name}{ending}"] = text
    return root, found


def _flat(rng: random.Random, num: int = 0) -> tuple[str, dict[str, str]]:
    root, found = _lot(rng, num)
    return root, {f"{root}/{PurePosixPath(path).name}": text for path, text in found.items()}


def _settled(root: str, due: Mapping[str, str]) -> tuple[Check, ...]:
    """Check that the folder has exactly these files."""
    return (only_files(f"{root}/*", frozenset(due)), *(has_text(path, text, "bytes") for path, text in due.items()))


def _move_by(rng: random.Random, asked: str, test: str, goes: Callable[[str, str], bool], copied: bool) -> TerminalTask:
    """Move or copy the files of a folder that satisfy a condition; `test` is the shell condition on $f."""
    root, found = _flat(rng)
    to = f"{words(rng, 1)[0]}-{'copies' if copied else 'moved'}"
    chosen = [path for path, text in found.items() if goes(path, text)]
    if not 1 <= len(chosen) < len(found):
        return _move_by(rng, asked, test, goes, copied)
    due = {f"{to}/{PurePosixPath(path).name}": found[path] for path in chosen}
    text = f"{'Copy' if copied else 'Move'} the files of the folder {root} {asked} to a new folder {to}."
    steps = (f"mkdir {to}", f'for f in {root}/*; do if {test}; then {"cp" if copied else "mv"} "$f" {to}/; fi; done')
    checks = _settled(to, due)
    if copied:
        return TerminalTask(text, found, steps, checks)
    left = {path: content for path, content in found.items() if path not in chosen}
    return TerminalTask(text, found, steps, (*checks, *_settled(root, left)), changes=(f"{root}/*",))


def _by_ending(copied: bool, rng: random.Random) -> TerminalTask:
    ending = rng.choice(ENDINGS[:4])
    test = f'[ "${{f%{ending}}}" != "$f" ]'
    return _move_by(rng, f"whose names end in {ending}", test, lambda path, text: path.endswith(ending), copied)


def _by_word(copied: bool, rng: random.Random) -> TerminalTask:
    word = rng.choice(words(rng, 1))
    return _move_by(
        rng,
        f'that have the word "{word}" in them',
        f'grep -qw {word} "$f"',
        lambda path, text: word in text.split(),
        copied,
    )


def _by_size(copied: bool, rng: random.Random) -> TerminalTask:
    size = rng.randint(80, 160)
    test = f'[ "$(wc -c < "$f")" -gt {size} ]'
    return _move_by(rng, f"that have more than {size} bytes", test, lambda p, text: len(text) > size, copied)


def _by_lines(copied: bool, rng: random.Random) -> TerminalTask:
    num = rng.randint(3, 5)
    test = f'[ "$(wc -l < "$f")" -le {num} ]'
    return _move_by(rng, f"that have at most {num} lines", test, lambda p, text: text.count("\n") <= num, copied)


def _by_year(rng: random.Random) -> TerminalTask:
    root = folder(rng)
    found = {
        f"{root}/{rng.randint(2019, 2022)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}-{name}": text_of(
            prose(rng, 2)
        )
        for name in names(rng, 9, ".txt")
    }
    due = {path.replace(f"{root}/", f"{root}/{path.split('/')[1][:4]}/"): text for path, text in found.items()}
    text = (
        f"The names of the files in {root} begin with a date. Move "
        f"each into a folder in {root} that is named after its "
        "year."
    )
    steps = (
        (f'for f in {root}/*.txt; do y=$(basename "$f" | cut -c1-4); mkdir -p {root}/$y; mv "$f" {root}/$y/; done'),
    )
    return TerminalTask(text, found, steps, _settled(root, due), changes=(f"{root}/*",))


def _renamed(
    rng: random.Random, asked: str, command: str, old: Callable[[int, str], str], new: Callable[[str], str]
) -> TerminalTask:
    """Rename the files of a folder; `command` prints the new name of $n."""
    root = folder(rng)
    found = {f"{root}/{old(n, name)}": text_of([f"{name} {n}", *prose(rng, 1)]) for n, name in enumerate(names(rng, 7))}
    due = {f"{root}/{new(PurePosixPath(path).name)}": text for path, text in found.items()}
    steps = (
        (f'for f in {root}/*; do n=$(basename "$f"); m=$({command}); [ "$n" = "$m" ] || mv "$f" "{root}/$m"; done'),
    )
    return TerminalTask(
        f"Rename the files in the folder {root}: {asked}", found, steps, _settled(root, due), changes=(f"{root}/*",)
    )


def _lower(rng: random.Random) -> TerminalTask:
    def old(n: int, name: str) -> str:
        return f"{name.title() if n % 2 else name.upper()}.txt"

    return _renamed(rng, "all letters become small ones.", 'echo "$n" | tr A-Z a-z', old, lambda name: name.lower())


def _blanks(rng: random.Random) -> TerminalTask:
    return _renamed(
        rng,
        "each blank becomes an underscore.",
        'echo "$n" | tr " " _',
        lambda n, name: name.replace("-", " ") + (" copy.txt" if n % 2 else ".txt"),
        lambda name: name.replace(" ", "_"),
    )


def _ending(rng: random.Random) -> TerminalTask:
    one, two = rng.sample(("jpeg", "text", "markdown", "htm", "yml"), 2)
    return _renamed(
        rng,
        f"the ending .{one} becomes .{two}; names with other endings stay.",
        f'echo "$n" | sed "s/\\.{one}$/.{two}/"',
        lambda n, name: f"{name}.{one}" if n % 3 else f"{name}.{one}.bak",
        lambda name: name.removesuffix(f".{one}") + f".{two}" if name.endswith(f".{one}") else name,
    )


def _padded(rng: random.Random) -> TerminalTask:
    width = rng.randint(3, 5)
    start = rng.randint(1, 6)
    return _renamed(
        rng,
        f"the number at the end of each name, before the ending, gets zeros in front until it has {width} digits.",
        f'printf "%s-%0{width}d.txt" "${{n%-*}}" "$(echo "${{n%.txt}}" | sed "s/.*-//")"',
        lambda n, name: f"{name}-{start + 7 * n}.txt",
        lambda name: f"{name.rpartition('-')[0]}-{int(name.rpartition('-')[2][:-4]):0{width}}.txt",
    )


def _dates(rng: random.Random) -> TerminalTask:
    days = rng.sample(range(1, 29), 7)
    month = rng.randint(1, 12)

    def new(name: str) -> str:
        rest, _, date = name.removesuffix(".txt").rpartition("_")
        day, mon, year = date.split("-")
        return f"{year}-{mon}-{day}_{rest}.txt"

    return _renamed(
        rng,
        "each name ends, before .txt, in an underscore and a "
        "date as day-month-year. The date goes to the front, as "
        "year-month-day and an underscore, and the rest of the name follows.",
        "echo \"$n\" | sed -E 's/^(.*)_([0-9]+)-([0-9]+)-([0-9]+)\\.txt$/\\4-\\3-\\2_\\1.txt/'",
        lambda n, name: f"{name}_{days[n]:02}-{month:02}-2023.txt",
        new,
    )


def _numbered(rng: random.Random) -> TerminalTask:
    root, prefix = folder(rng), words(rng, 1)[0]
    found = {f"{root}/{name}": text_of([name, *prose(rng, 1)]) for name in names(rng, 8, ".txt")}
    due = {f"{root}/{prefix}-{n:02}.txt": found[path] for n, path in enumerate(sorted(found), 1)}
    text = (
        f"Rename the files in the folder {root} to {prefix}-01.txt, "
        f"{prefix}-02.txt and so on, in the order of their names "
        "from A to Z."
    )
    steps = (f'i=0; for f in {root}/*; do i=$((i+1)); mv "$f" {root}/$(printf "{prefix}-%02d.txt" $i); done',)
    return TerminalTask(text, found, steps, _settled(root, due), changes=(f"{root}/*",))


def _removed(
    rng: random.Random, root: str, found: Mapping[str, str], gone: set[str], ask: tuple[str, str]
) -> TerminalTask:
    left = {path: text for path, text in found.items() if path not in gone and path.startswith(f"{root}/")}
    text, command = ask
    return TerminalTask(
        text, found, (command,), (only_files(f"{root}/*", frozenset(left)),), changes=tuple(sorted(gone))
    )


def _empty(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng)
    gone = set(rng.sample(sorted(found), 3))
    found |= dict.fromkeys(sorted(gone), "")
    ask = f"Remove all empty files in {root} and its folders, and nothing else."
    return _removed(rng, root, found, gone, (ask, f"find {root} -type f -empty -delete"))


def _temporary(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng)
    endings = rng.sample((".tmp", ".bak", ".swp", ".old"), 2)
    gone = {path + endings[n % 2] for n, path in enumerate(rng.sample(sorted(found), 4))}
    found |= dict.fromkeys(sorted(gone), "left\n")
    ask = (
        f"Remove all files in {root} and its folders whose names end in {endings[0]} or {endings[1]}, and nothing else."
    )
    command = f"find {root} -type f \\( -name '*{endings[0]}' -o -name '*{endings[1]}' \\) -delete"
    return _removed(rng, root, found, gone, (ask, command))


def _listed(keep: bool, rng: random.Random) -> TerminalTask:
    root, found = _flat(rng)
    listed = sorted(PurePosixPath(path).name for path in rng.sample(sorted(found), 5))
    note = f"{words(rng, 1)[0]}-list.txt"
    gone = {path for path in found if (PurePosixPath(path).name in listed) != keep}
    if keep:
        ask = f"Remove the files in {root} whose names are not in {note}, a list of names to keep."
        command = f'for f in {root}/*; do grep -qxF "$(basename "$f")" {note} || rm "$f"; done'
    else:
        ask = f"Remove the files in {root} whose names are in {note}. The list stays."
        command = f'while read -r n; do rm "{root}/$n"; done < {note}'
    return _removed(rng, root, {**found, note: text_of(listed)}, gone, (ask, command))


def _twins(rng: random.Random) -> TerminalTask:
    root, found = _flat(rng, 8)
    originals = sorted(found)
    for name, path in zip(names(rng, 4, ".txt"), rng.choices(originals, k=4), strict=True):
        found[f"{root}/{name}"] = found[path]
    first: dict[str, str] = {}
    for path in sorted(found):
        first.setdefault(found[path], path)
    gone = set(found) - set(first.values())
    ask = (
        f"Some files in {root} have the same contents. Of each such "
        "group keep the one whose name is first from A to Z and "
        "remove the others."
    )
    command = (
        f"(cd {root} && sha256sum * | sort -k1,1 -k2,2 | awk "
        f"'seen[$1]++ {{print $2}}' | while read -r f; do rm \"$f\"; done)"
    )
    return _removed(rng, root, found, gone, (ask, command))


def _report(rng: random.Random, ask: str, found: Mapping[str, str], due: list[str], command: str) -> TerminalTask:
    out = f"{words(rng, 1)[0]}-report.txt"
    return TerminalTask(f"{ask} Write it to {out}.", found, (f"{command} > {out}",), (has_text(out, text_of(due)),))


def _sizes(rng: random.Random) -> TerminalTask:
    root, found = _flat(rng)
    ranked = sorted(found, key=lambda path: -len(found[path]))
    due = [f"{len(found[path])} {PurePosixPath(path).name}" for path in ranked]
    ask = f"List the files in {root}, the largest first: each line has the bytes, a blank and the name."
    return _report(
        rng, ask, found, due, f"(cd {root} && wc -c * | grep -v ' total$' | awk '{{print $1, $2}}' | sort -nr)"
    )


def _endings(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng)
    counts = Counter(PurePosixPath(path).suffix for path in found)
    ask = (
        f"Count the files in {root} and its folders by ending: each "
        "line has the ending with its dot, a blank and the number, "
        "in the order of the endings from A to Z."
    )
    command = f"find {root} -type f | sed 's/.*\\././' | sort | uniq -c | awk '{{print $2, $1}}'"
    return _report(rng, ask, found, [f"{ending} {counts[ending]}" for ending in sorted(counts)], command)


def _sums(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng)
    ask = (
        f"List the SHA-256 sums of all files in {root} and its "
        "folders as sha256sum prints them, with paths that begin with "
        f"{root}/, in the order of the paths."
    )
    due = [f"{hashlib.sha256(found[path].encode()).hexdigest()}  {path}" for path in sorted(found)]
    return _report(rng, ask, found, due, f"find {root} -type f | sort | xargs sha256sum")


def _corrupt(rng: random.Random) -> TerminalTask:
    root, found = _flat(rng)
    sums = [f"{hashlib.sha256(found[p].encode()).hexdigest()}  {PurePosixPath(p).name}" for p in sorted(found)]
    bad = sorted(rng.sample(sorted(found), 3))
    files = {path: text[:-2] + "?\n" if path in bad else text for path, text in found.items()}
    files[f"{root}/SHA256SUMS"] = text_of(sums)
    ask = f"List the names of the files in {root} that do not fit the sums in {root}/SHA256SUMS, from A to Z."
    command = f"(cd {root} && sha256sum -c SHA256SUMS 2>/dev/null | grep -v ': OK$' | cut -d: -f1 | sort)"
    return _report(rng, ask, files, [PurePosixPath(path).name for path in bad], command)


def _totals(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng, 14)
    sums: Counter[str] = Counter()
    for path, text in found.items():
        sums[str(PurePosixPath(path).parent)] += len(text)
    ask = (
        f"For {root} and each folder in it say how many bytes the "
        "files have that lie in it (not in folders further down): each "
        "line has the folder's path, a colon and the bytes, in "
        "the order of the paths. Leave folders without files out."
    )
    command = (
        f'find {root} -type f -exec wc -c {{}} \\; | awk \'{{p=$2; sub(/\\/[^\\/]*$/, "", p); n[p]+=$1}} '
        'END {for (p in n) print p ":" n[p]}\' | sort'
    )
    return _report(rng, ask, found, sorted(f"{path}:{size}" for path, size in sums.items()), command)


def _compared(rng: random.Random) -> TerminalTask:
    one, two = (f"{word}-tree" for word in words(rng, 2))
    plain = names(rng, 10, ".txt")
    left, right = plain[:8], plain[2:]
    files = {f"{one}/{name}": f"{name}\n" for name in left}
    changed = set(rng.sample(plain[2:8], 2))
    files |= {f"{two}/{name}": f"{name}{'!' if name in changed else ''}\n" for name in right}
    due = [f"< {name}" for name in left if name not in right] + [f"> {name}" for name in right if name not in left]
    due += [f"! {name}" for name in changed]
    due.sort(key=lambda line: line[2:])
    ask = (
        f'Compare the folders {one} and {two}: "< NAME" for a file '
        f'that only {one} has, "> NAME" for one that only {two} has, '
        '"! NAME" for one that both have with different contents, in the order of the names.'
    )
    command = (
        f'for n in $(ls {one} {two} | grep txt | sort -u); do if [ ! -e {two}/$n ]; then echo "< $n"; '
        f'elif [ ! -e {one}/$n ]; then echo "> $n"; elif ! '
        f'cmp -s {one}/$n {two}/$n; then echo "! $n"; fi; done'
    )
    return _report(rng, ask, files, due, command)


def _scripts(rng: random.Random) -> TerminalTask:
    root, found = _flat(rng)
    scripts = set(rng.sample(sorted(found), 4))
    found = {path: ("#!/bin/sh\n" if path in scripts else "") + text for path, text in found.items()}
    before = frozenset(rng.sample(sorted(found), 4))
    text = (
        f"In the folder {root} exactly the files that begin with "
        '"#!" shall be executable. Mend their permissions and leave '
        "their contents as they are."
    )
    steps = (
        (f'for f in {root}/*; do if [ "$(head -c 2 "$f")" = "#!" ]; then chmod +x "$f"; else chmod -x "$f"; fi; done'),
    )
    checks: tuple[Check, ...] = (
        only_executable(f"{root}/*", frozenset(scripts)),
        *(has_text(path, content, "bytes") for path, content in found.items()),
    )
    return TerminalTask(text, found, steps, checks, changes=(f"{root}/*",), executable=before)


def _joined(rng: random.Random) -> TerminalTask:
    root, base = folder(rng), words(rng, 1)[0]
    parts = {f"{root}/{base}.part{n}": text_of(prose(rng, 2)) for n in rng.sample(range(1, 30), 11)}
    out = f"{base}.txt"
    due = "".join(parts[path] for path in sorted(parts, key=lambda path: int(path.rpartition("part")[2])))
    text = f"Put the parts {base}.partN in {root} together in the order of their numbers, as the file {out}."
    return TerminalTask(text, parts, (f"cat $(ls {root}/* | sort -t. -k2.5n) > {out}",), (has_text(out, due, "bytes"),))


def _chunks(rng: random.Random) -> TerminalTask:
    size, (base, to) = rng.randint(4, 7), words(rng, 2)
    lines = [f"{n} {line}" for n, line in enumerate(prose(rng, size * 4 + 2))]
    due = {f"{to}/{n // size + 1:03}.txt": text_of(lines[n : n + size]) for n in range(0, len(lines), size)}
    text = (
        f"Cut {base}.txt into pieces of {size} lines (the last "
        f"one may be shorter): {to}/001.txt, {to}/002.txt and so on."
    )
    steps = (
        f"mkdir {to}",
        f'awk \'{{printf "%s\\n", $0 > sprintf("{to}/%03d.txt", int((NR-1)/{size})+1)}}\' {base}.txt',
    )
    return TerminalTask(text, {f"{base}.txt": text_of(lines)}, steps, _settled(to, due), preview=(f"{base}.txt",))


def _flattened(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng, 10)
    to = f"{words(rng, 1)[0]}-flat"
    due = {f"{to}/{path.removeprefix(f'{root}/').replace('/', '__')}": text for path, text in found.items()}
    text = (
        f"Copy all files in {root} and its folders into one new "
        f"folder {to}. Their names there are their paths inside {root} "
        "with two underscores in the place of each slash."
    )
    steps = (
        f"mkdir {to}",
        (
            f"(cd {root} && find . -type f | sed 's|^\\./||' | while read -r f; do "
            f'cp "$f" "../{to}/$(echo "$f" | sed "s|/|__|g")"; done)'
        ),
    )
    return TerminalTask(text, found, steps, _settled(to, due))


def _mirrored(rng: random.Random) -> TerminalTask:
    root, found = _lot(rng, 10)
    to = f"{words(rng, 1)[0]}-mirror"
    old = {path.replace(root, to, 1): text for path, text in found.items()}
    for path in rng.sample(sorted(old), 3):
        del old[path]
    for path in rng.sample(sorted(old), 2):
        old[path] = "old\n"
    old |= {f"{to}/{name}": "gone\n" for name in names(rng, 2, ".txt")}
    due = {path.replace(root, to, 1): text for path, text in found.items()}
    text = (
        f"Make {to} a mirror of {root}: the same files with the "
        "same contents, also in its folders, and no others. Do not "
        f"change {root}."
    )
    steps = (f"rm -r {to}", f"cp -r {root} {to}")
    return TerminalTask(text, {**found, **old}, steps, _settled(to, due), changes=(f"{to}/*",))


def _library(rng: random.Random) -> TerminalTask:
    """Sort files into folders without duplicates, and write an index of their origins."""
    root, to = folder(rng), f"{words(rng, 1)[0]}-library"
    kinds = rng.sample(("note", "letter", "recipe", "plan"), 3)
    found, due, index, seen = dict[str, str](), dict[str, str](), list[str](), set[str]()
    bodies = [text_of(prose(rng, 2)) for _ in range(8)]
    for n, name in enumerate(sorted(names(rng, 11, ".txt"))):
        body = bodies[n] if n < 8 else rng.choice(bodies)
        kind = kinds[len(body) % 3]
        text = f"kind: {kind}\n{body}"
        found[f"{root}/{name}"] = text
    for path in sorted(found):
        if found[path] in seen:
            continue
        seen.add(found[path])
        kind, name = found[path].split("\n")[0].removeprefix("kind: "), PurePosixPath(path).name
        due[f"{to}/{kind}/{name}"] = found[path]
        index.append(f"{kind}/{name} {len(found[path])}")
    due[f"{to}/index.txt"] = text_of(sorted(index))
    text = (
        f'The first line of each file in {root} says its kind ("kind: '
        f'{kinds[0]}"). Copy each file to {to}/KIND/NAME. Where several '
        "have the same contents, copy only the one whose name is first from A to Z. Write to "
        f"{to}/index.txt a line for each file copied, with "
        "KIND/NAME, a blank and its bytes, in the order of the lines."
    )
    steps = (
        f"mkdir {to}",
        (
            f"for f in $(cd {root} && sha256sum * | sort -k1,1 -k2,2 | awk '!s[$1]++ {{print $2}}'); do "
            f"k=$(head -n 1 {root}/$f | cut -d' ' -f2); mkdir -p {to}/$k; cp {root}/$f {to}/$k/; done"
        ),
        f'(cd {to} && for f in */*; do echo "$f $(wc -c < $f)"; done | sort > index.txt)',
    )
    return TerminalTask(text, found, steps, _settled(to, due))


MAKERS: Final = (
    TaskMaker("files/move_ending", 1, partial(_by_ending, False)),
    TaskMaker("files/copy_ending", 1, partial(_by_ending, True)),
    TaskMaker("files/lower", 1, _lower),
    TaskMaker("files/blanks", 1, _blanks),
    TaskMaker("files/ending", 1, _ending),
    TaskMaker("files/empty", 1, _empty),
    TaskMaker("files/temporary", 1, _temporary),
    TaskMaker("files/sizes", 1, _sizes),
    TaskMaker("files/sums", 1, _sums),
    TaskMaker("files/move_word", 2, partial(_by_word, False)),
    TaskMaker("files/copy_word", 2, partial(_by_word, True), held_out=True),
    TaskMaker("files/move_size", 2, partial(_by_size, False)),
    TaskMaker("files/copy_lines", 2, partial(_by_lines, True)),
    TaskMaker("files/move_lines", 2, partial(_by_lines, False), held_out=True),
    TaskMaker("files/year", 2, _by_year),
    TaskMaker("files/padded", 2, _padded),
    TaskMaker("files/numbered", 2, _numbered),
    TaskMaker("files/remove_listed", 2, partial(_listed, False)),
    TaskMaker("files/keep_listed", 2, partial(_listed, True)),
    TaskMaker("files/endings", 2, _endings),
    TaskMaker("files/corrupt", 2, _corrupt),
    TaskMaker("files/joined", 2, _joined),
    TaskMaker("files/chunks", 2, _chunks),
    TaskMaker("files/scripts", 2, _scripts),
    TaskMaker("files/dates", 3, _dates),
    TaskMaker("files/twins", 3, _twins),
    TaskMaker("files/totals", 3, _totals),
    TaskMaker("files/compared", 3, _compared, held_out=True),
    TaskMaker("files/flattened", 3, _flattened),
    TaskMaker("files/mirrored", 3, _mirrored),
    TaskMaker("files/library", 4, _library),
)
