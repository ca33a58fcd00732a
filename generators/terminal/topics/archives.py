"""Tasks about archives: create, unpack, repair, compare."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import random
import tarfile
import zipfile
from collections.abc import Mapping
from typing import Final

from generators.terminal.draw import folder, names, prose, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import Check, archive_holds, gzip_has_text, has_text, only_files
from ludus.worlds.terminal.task import TerminalTask

Content = Mapping[str, str]


def tarred(members: Content, packed: bool = True) -> bytes:
    """Return a tar archive, with or without gzip; equal members result in equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(text.encode()), 1_700_000_000
            archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0) if packed else buffer.getvalue()


def zipped(members: Content) -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2023, 11, 14, 0, 0, 0)), text)
    return buffer.getvalue()


def _tree(rng: random.Random, root: str, num: int = 8) -> dict[str, str]:
    inner = ["", "", *(f"{word}/" for word in words(rng, 2))]
    endings = (".txt", ".log", ".md", ".tmp")
    return {
        f"{root}/{rng.choice(inner)}{name}{endings[n % 4]}": text_of(prose(rng, rng.randint(1, 5)))
        for n, name in enumerate(names(rng, num))
    }


def _bytes(content: Content) -> dict[str, bytes]:
    return {path: text.encode() for path, text in content.items()}


def _exactly(root: str, due: Content) -> tuple[Check, ...]:
    return (only_files(f"{root}/*", frozenset(due)), *(has_text(path, text, "bytes") for path, text in due.items()))


def _packed(rng: random.Random) -> TerminalTask:
    root = folder(rng)
    found = _tree(rng, root)
    out = f"{words(rng, 1)[0]}.tar.gz"
    text = f"Pack the folder {root} into the archive {out}; the paths in it begin with {root}/."
    return TerminalTask(text, found, (f"tar -czf {out} {root}",), (archive_holds(out, _bytes(found)),))


def _zip(rng: random.Random) -> TerminalTask:
    root = folder(rng)
    found = _tree(rng, root)
    out = f"{words(rng, 1)[0]}.zip"
    text = f"Pack the folder {root} into the zip archive {out}; the paths in it begin with {root}/."
    return TerminalTask(text, found, (f"python3 -m zipfile -c {out} {root}",), (archive_holds(out, _bytes(found)),))


def _without(rng: random.Random) -> TerminalTask:
    root = folder(rng)
    found = _tree(rng, root, 10)
    out, ending = f"{words(rng, 1)[0]}.tar.gz", rng.choice((".log", ".tmp"))
    due = {path: text for path, text in found.items() if not path.endswith(ending)}
    text = (
        f"Pack the folder {root} into {out}, its paths beginning "
        f"with {root}/, but leave out files that end in {ending}."
    )
    return TerminalTask(
        text, found, (f"tar -czf {out} --exclude='*{ending}' {root}",), (archive_holds(out, _bytes(due)),)
    )


def _unpacked(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root)
    to = f"{out}-unpacked"
    due = {f"{to}/{path}": text for path, text in found.items()}
    text = f"Unpack {root}.tar.gz into a new folder {to}, and keep the archive."
    steps = (f"mkdir {to} && tar -xzf {root}.tar.gz -C {to}",)
    return TerminalTask(text, {f"{root}.tar.gz": tarred(found)}, steps, _exactly(to, due))


def _stripped(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = {f"{root}-1.0/{path}": text for path, text in _tree(rng, "src").items()}
    to = f"{out}-build"
    due = {path.replace(f"{root}-1.0/src/", f"{to}/"): text for path, text in found.items()}
    text = (
        f"All paths in {root}.tar.gz begin with {root}-1.0/src/. "
        f"Unpack it into a new folder {to} without these two folders."
    )
    steps = (f"mkdir {to} && tar -xzf {root}.tar.gz -C {to} --strip-components=2",)
    return TerminalTask(text, {f"{root}.tar.gz": tarred(found)}, steps, _exactly(to, due))


def _one(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root)
    path = rng.choice(sorted(found))
    text = f"Take the file {path} out of {root}.tar.gz and write it to {out}.txt. Nothing else of it is wanted."
    steps = (f"tar -xzOf {root}.tar.gz {path} > {out}.txt",)
    checks = (has_text(f"{out}.txt", found[path], "bytes"), only_files(f"{root}/*", frozenset()))
    return TerminalTask(text, {f"{root}.tar.gz": tarred(found)}, steps, checks)


def _listed(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root, 10)
    text = f"Write the paths of the files in {root}.zip to {out}.txt, from A to Z."
    program = f'import zipfile; print("\\n".join(sorted(zipfile.ZipFile("{root}.zip").namelist())))'
    steps = (f"python3 -c '{program}' > {out}.txt",)
    return TerminalTask(text, {f"{root}.zip": zipped(found)}, steps, (has_text(f"{out}.txt", text_of(sorted(found))),))


def _each(rng: random.Random) -> TerminalTask:
    root = folder(rng)
    found = {f"{root}/{name}.log": text_of(prose(rng, 4)) for name in names(rng, 6)}
    there = {**found, f"{root}/readme.txt": "these are logs\n"}
    text = (
        f"Compress each .log file in {root} with gzip, so that "
        "NAME.log.gz takes the place of NAME.log. Other files stay."
    )
    checks: tuple[Check, ...] = (
        only_files(f"{root}/*", frozenset({*(f"{path}.gz" for path in found), f"{root}/readme.txt"})),
        *(gzip_has_text(f"{path}.gz", body) for path, body in found.items()),
    )
    return TerminalTask(text, there, (f"gzip {root}/*.log",), checks, changes=(f"{root}/*.log",))


def _folders(rng: random.Random) -> TerminalTask:
    root, to = folder(rng), f"{words(rng, 1)[0]}-packed"
    parts = {name: _tree(rng, f"{root}/{name}", 4) for name in words(rng, 3)}
    text = (
        f"Pack each folder in {root} into an archive of its own: "
        f"{to}/NAME.tar.gz, whose paths begin with NAME/. The folder {to} is "
        "new and has nothing else."
    )
    steps = (f'mkdir {to}; for d in {root}/*/; do n=$(basename "$d"); tar -czf {to}/$n.tar.gz -C {root} $n; done',)
    checks: tuple[Check, ...] = (
        only_files(f"{to}/*", frozenset(f"{to}/{name}.tar.gz" for name in parts)),
        *(
            archive_holds(f"{to}/{name}.tar.gz", _bytes({path.removeprefix(f"{root}/"): t for path, t in tree.items()}))
            for name, tree in parts.items()
        ),
    )
    return TerminalTask(text, {path: body for tree in parts.values() for path, body in tree.items()}, steps, checks)


def _converted(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root)
    text = (
        f"Make a zip archive {out}.zip with the same files, under the "
        f"same paths, as {root}.tar.gz. Leave no other files behind."
    )
    steps = (
        (f"mkdir .t && tar -xzf {root}.tar.gz -C .t && (cd .t && python3 -m zipfile -c ../{out}.zip *) && rm -r .t"),
    )
    checks = (archive_holds(f"{out}.zip", _bytes(found)), only_files("*", frozenset({f"{out}.zip", f"{root}.tar.gz"})))
    return TerminalTask(text, {f"{root}.tar.gz": tarred(found)}, steps, checks)


def _nested(rng: random.Random) -> TerminalTask:
    root, inner, word = words(rng, 3)
    secret = text_of(prose(rng, 3))
    core = zipped({f"{word}/{word}.txt": secret, f"{word}/readme.md": "inside\n"})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in ((f"{inner}.zip", core), ("notes.txt", b"outside\n")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    outer = gzip.compress(buffer.getvalue(), mtime=0)
    text = (
        f"In {root}.tar.gz lies an archive, and in that a file "
        f"{word}.txt. Write it to {word}-found.txt, and keep {root}.tar.gz."
    )
    steps = (
        f"mkdir .t && tar -xzf {root}.tar.gz -C .t && python3 -m zipfile -e .t/{inner}.zip .t",
        f"cp .t/{word}/{word}.txt {word}-found.txt && rm -r .t",
    )
    return TerminalTask(text, {f"{root}.tar.gz": outer}, steps, (has_text(f"{word}-found.txt", secret, "bytes"),))


def _trimmed(rng: random.Random) -> TerminalTask:
    root = words(rng, 1)[0]
    found = _tree(rng, root, 10)
    gone = rng.choice((".log", ".tmp", ".md"))
    due = {path: text for path, text in found.items() if not path.endswith(gone)}
    text = (
        f"Change the archive {root}.tar so that it no longer has the files that end in {gone}. The others stay in it."
    )
    return TerminalTask(
        text,
        {f"{root}.tar": tarred(found, packed=False)},
        (f"tar --delete --wildcards -f {root}.tar '*{gone}'",),
        (archive_holds(f"{root}.tar", _bytes(due)),),
        changes=(f"{root}.tar",),
    )


def _updated(rng: random.Random) -> TerminalTask:
    root = words(rng, 1)[0]
    found = _tree(rng, root)
    path = rng.choice(sorted(found))
    new = text_of(prose(rng, 2))
    text = (
        f"{root}-new.txt is a newer version of {path}, which lies in "
        f"{root}.tar.gz. Make the archive anew with this version in its "
        "place, the other files as they are."
    )
    steps = (
        f"mkdir .t && tar -xzf {root}.tar.gz -C .t && cp {root}-new.txt .t/{path}",
        f"tar -czf {root}.tar.gz -C .t {root} && rm -r .t",
    )
    checks = (archive_holds(f"{root}.tar.gz", _bytes({**found, path: new})),)
    files: dict[str, str | bytes] = {f"{root}.tar.gz": tarred(found), f"{root}-new.txt": new}
    return TerminalTask(text, files, steps, checks, changes=(f"{root}.tar.gz",))


def _split(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root, 12)
    data = tarred(found)
    size = len(data) // 4 + 1
    pieces = {f"{root}.tar.gz.{n:02}": data[n * size : (n + 1) * size] for n in range(4)}
    to = f"{out}-whole"
    text = (
        f"An archive was cut into the pieces {root}.tar.gz.00 and so "
        f"on. Put it together and unpack it into a new folder {to}."
    )
    steps = (f"mkdir {to} && cat {root}.tar.gz.?? | tar -xz -C {to}",)
    return TerminalTask(text, pieces, steps, _exactly(to, {f"{to}/{path}": body for path, body in found.items()}))


def _encoded(rng: random.Random) -> TerminalTask:
    root, out = words(rng, 2)
    found = _tree(rng, root, 5)
    to = f"{out}-mail"
    text = f"{root}.b64 is a tar archive, packed with gzip and written in base64. Unpack it into a new folder {to}."
    data = base64.encodebytes(tarred(found))
    steps = (f"mkdir {to} && base64 -d {root}.b64 | tar -xz -C {to}",)
    checks = _exactly(to, {f"{to}/{path}": body for path, body in found.items()})
    return TerminalTask(text, {f"{root}.b64": data}, steps, checks)


def _which(rng: random.Random) -> TerminalTask:
    root, wanted = folder(rng), f"{words(rng, 1)[0]}-wanted.txt"
    found = {name: _tree(rng, name, 4) for name in words(rng, 6)}
    due = sorted(rng.sample(sorted(found), 2))
    for name in due:
        found[name][f"{name}/{wanted}"] = "here\n"
    out = f"{words(rng, 1)[0]}-answer.txt"
    text = (
        f"Which of the archives in {root} have a file with the name "
        f"{wanted} (in any folder)? Write their names to {out}, from A "
        "to Z, each on a line."
    )
    steps = (
        (f"(cd {root} && for a in *.tar.gz; do tar -tzf $a | grep -q '/{wanted}$' && echo $a; done; true) > {out}"),
    )
    files = {f"{root}/{name}.tar.gz": tarred(tree) for name, tree in found.items()}
    return TerminalTask(text, files, steps, (has_text(out, text_of([f"{name}.tar.gz" for name in due])),))


def _compared(rng: random.Random) -> TerminalTask:
    root, out = folder(rng), f"{words(rng, 1)[0]}-differs.txt"
    found = _tree(rng, root, 9)
    paths = sorted(found)
    there = {path: text for path, text in found.items() if path != paths[0]}
    there |= {paths[2]: there[paths[2]] + "more\n", paths[5]: "other\n", f"{root}/new.txt": "new\n"}
    text = (
        f"backup.tar.gz is a copy of the folder {root} of yesterday. "
        f"Write to {out} the paths of the files that are not the same "
        "today: changed, gone or new, from A to Z."
    )
    steps = (
        "mkdir .t && tar -xzf backup.tar.gz -C .t",
        (
            f"(for f in $( (find {root} -type f; cd .t; find {root} -type f) | sort -u); do "
            f"cmp -s $f .t/$f || echo $f; done) > {out}; rm -r .t"
        ),
    )
    due = sorted([paths[0], paths[2], paths[5], f"{root}/new.txt"])
    return TerminalTask(text, {**there, "backup.tar.gz": tarred(found)}, steps, (has_text(out, text_of(due)),))


def _sound(rng: random.Random) -> TerminalTask:
    root, to = folder(rng), f"{words(rng, 1)[0]}-sound"
    trees = {name: _tree(rng, name, 3) for name in words(rng, 5)}
    data = {name: tarred(tree) for name, tree in trees.items()}
    sums = [f"{hashlib.sha256(data[name]).hexdigest()}  {name}.tar.gz" for name in sorted(data)]
    bad = rng.sample(sorted(data), 2)
    other = {name: tarred({f"{name}/wrong.txt": "wrong\n"}) if name in bad else data[name] for name in data}
    files: dict[str, str | bytes] = {f"{root}/{name}.tar.gz": content for name, content in other.items()}
    files[f"{root}/sums.txt"] = text_of(sums)
    text = (
        f"Unpack into a new folder {to} those archives of {root} that "
        f"fit their SHA-256 sums in {root}/sums.txt, and write the names "
        f"of the others to {to}/refused.txt, from A to Z."
    )
    steps = (
        f"mkdir {to}",
        (
            f"(cd {root} && sha256sum -c sums.txt 2>/dev/null | while IFS=': ' read -r a v; do "
            f'if [ "$v" = OK ]; then tar -xzf $a -C ../{to}; else echo $a; fi; done) '
            f"| sort > {to}/refused.txt"
        ),
    )
    due = {f"{to}/{path}": t for name, tree in trees.items() if name not in bad for path, t in tree.items()}
    due[f"{to}/refused.txt"] = text_of([f"{name}.tar.gz" for name in sorted(bad)])
    return TerminalTask(text, files, steps, _exactly(to, due))


def _increments(rng: random.Random) -> TerminalTask:
    """A full backup and incremental backups of the following days."""
    root, to = words(rng, 1)[0], f"{words(rng, 1)[0]}-restored"
    state = _tree(rng, root, 8)
    files: dict[str, str | bytes] = {"backups/day0.tar.gz": tarred(state)}
    for day in range(1, 5):
        changed = dict.fromkeys(rng.sample(sorted(state), 2), f"day {day}\n")
        changed[f"{root}/added-{day}.txt"] = text_of(prose(rng, 1))
        gone = sorted(rng.sample(sorted(set(state) - set(changed)), 1))
        files[f"backups/day{day}.tar.gz"] = tarred(changed)
        files[f"backups/day{day}.removed"] = text_of(gone)
        state = {path: text for path, text in {**state, **changed}.items() if path not in gone}
        if day == 3:
            due = dict(state)
    text = (
        f"backups/day0.tar.gz is a full backup of the folder {root}. "
        "dayN.tar.gz has the files that were added or changed on day N, "
        "dayN.removed lists the paths that were removed on that day. "
        f"Restore {root} as it was after day 3 in a new folder {to}, so "
        f"that its paths begin with {to}/{root}/."
    )
    steps = (
        f"mkdir {to}",
        (
            f"for d in 0 1 2 3; do tar -xzf backups/day$d.tar.gz -C {to}; "
            f"if [ $d != 0 ]; then while read -r p; do rm {to}/$p; done < backups/day$d.removed; fi; done"
        ),
    )
    return TerminalTask(text, files, steps, _exactly(to, {f"{to}/{path}": body for path, body in due.items()}))


MAKERS: Final = (
    TaskMaker("archives/pack", 1, _packed),
    TaskMaker("archives/zip", 1, _zip),
    TaskMaker("archives/unpack", 1, _unpacked),
    TaskMaker("archives/one", 1, _one),
    TaskMaker("archives/each", 1, _each),
    TaskMaker("archives/list", 2, _listed),
    TaskMaker("archives/without", 2, _without),
    TaskMaker("archives/strip", 2, _stripped),
    TaskMaker("archives/folders", 2, _folders),
    TaskMaker("archives/encoded", 2, _encoded),
    TaskMaker("archives/which", 2, _which),
    TaskMaker("archives/trim", 2, _trimmed, held_out=True),
    TaskMaker("archives/convert", 3, _converted),
    TaskMaker("archives/nested", 3, _nested),
    TaskMaker("archives/update", 3, _updated),
    TaskMaker("archives/split", 3, _split, held_out=True),
    TaskMaker("archives/compare", 3, _compared),
    TaskMaker("archives/sound", 4, _sound),
    TaskMaker("archives/increments", 4, _increments),
)
