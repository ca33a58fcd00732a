"""Files of the box, put in and collected: regular ones only, links never followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from ludus.sandbox.guest.kernel import NODEV, NOSUID, REMOUNT, Bounds, mount
from ludus.sandbox.guest.program import BOX

_DEEPEST = 32


def walk(root: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Each file under a folder's descriptor that is no folder: its path, where it lies, its name, its state.

    Follows no link and goes 32 folders deep.
    """
    for name in sorted(os.listdir(root)):
        if not name.isprintable():
            continue
        state = os.stat(name, dir_fd=root, follow_symlinks=False)
        if not stat.S_ISDIR(state.st_mode):
            yield prefix + name, root, name, state
        elif depth < _DEEPEST:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            try:
                yield from walk(inner, f"{prefix}{name}/", depth + 1)
            finally:
                os.close(inner)


def collect(
    bounds: Bounds, known: dict[str, bytes], box: str = BOX
) -> tuple[dict[str, bytes], set[str], bool]:
    """Regular files with one link that are not as in `known`; which of them are executable; some left out?"""
    files: dict[str, bytes] = {}
    executable, cut, room = set(), False, bounds.files_out_bytes
    root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, folder, name, state in walk(root):
            if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
                continue
            if path in known and state.st_size == len(known[path]) and _read(folder, name) == known[path]:
                continue
            if len(files) >= bounds.files_out or state.st_size > room:
                cut = True
                continue
            files[path] = _read(folder, name)[:room]
            room -= len(files[path])
            if state.st_mode & 0o100:
                executable.add(path)
    except OSError:  # a session's processes may change folders under our feet
        cut = True
    finally:
        os.close(root)
    return files, executable, cut


def _read(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def make_box(bounds: Bounds) -> None:
    """Give the folders of the run their sizes. Raises OSError."""
    mount(
        None, BOX, None, REMOUNT | NOSUID | NODEV, f"size={bounds.disk_bytes},nr_inodes={bounds.disk_files}"
    )


def put(files: dict[str, bytes], executable: set[str], box: str = BOX) -> None:
    """Write files under the box; no link is followed. Raises OSError."""
    root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, content in files.items():
            _put_one(
                root, [part for part in path.split("/") if part not in ("", ".")], content, path in executable
            )
    finally:
        os.close(root)


def _put_one(root: int, parts: list[str], content: bytes, executable: bool) -> None:
    folder = os.dup(root)
    try:
        for part in parts[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(parts[-1], flags, 0o644, dir_fd=folder)
        with open(fd, "wb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EPERM, "not a regular file")
            file.write(content)
            if executable:
                os.fchmod(fd, 0o755)
    finally:
        os.close(folder)


def wipe(attempts: int) -> None:
    """Empty the box, however deep its folders are. Raises OSError."""
    root = os.open(BOX, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(attempts):
            names = os.listdir(root)
            if not names:
                return
            _remove(root, names[0], number)
        raise OSError(errno.EBUSY, "files appear faster than they can be removed")
    finally:
        os.close(root)


def _remove(root: int, name: str, number: int) -> None:
    try:
        os.unlink(name, dir_fd=root)
        return
    except IsADirectoryError:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    try:
        for index, child in enumerate(os.listdir(inner)):
            try:
                os.unlink(child, dir_fd=inner)
            except IsADirectoryError:
                os.rename(child, f".gone-{number}-{index}", src_dir_fd=inner, dst_dir_fd=root)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)
