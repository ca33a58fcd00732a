"""Write and collect files of the box: regular files only, never following links."""

from __future__ import annotations

import errno
import os
import stat

from ludus.sandbox.guest.kernel import NODEV, NOSUID, REMOUNT, ResourceBounds, mount
from ludus.sandbox.guest.light import Suppress
from ludus.sandbox.guest.program import BOX

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Iterator

DEEPEST, LONGEST = 32, 512
"""Maximum depth of a file, and characters of its path."""


class FileTree:
    """Files under a folder. `left_out` counts those that `walk` skipped."""

    def __init__(self) -> None:
        self.left_out = 0

    def walk(self, root: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int, str, os.stat_result]]:
        """Yield each regular file under a folder descriptor: path, folder descriptor, name, stat.

        Never follows links. Skips files with several links, unprintable names, folders that are too deep and
        paths that are too long; a skipped folder counts once.
        """
        for name in sorted(os.listdir(root)):
            state = os.stat(name, dir_fd=root, follow_symlinks=False)
            odd = not name.isprintable() or len(prefix) + len(name) > LONGEST
            if stat.S_ISREG(state.st_mode):
                if odd or state.st_nlink != 1:
                    self.left_out += 1
                else:
                    yield prefix + name, root, name, state
            elif stat.S_ISDIR(state.st_mode):
                if odd or depth >= DEEPEST:
                    self.left_out += 1
                    continue
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
                try:
                    yield from self.walk(inner, f"{prefix}{name}/", depth + 1)
                finally:
                    os.close(inner)


class Collected:
    """Regular files of a box: contents by path, and the executable ones.

    `cut` is set if limits excluded files or files vanished meanwhile; `left_out` counts unnameable files.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.executable: set[str] = set()
        self.cut = False
        self.left_out = 0


def collect(bounds: ResourceBounds, known: dict[str, bytes], box: str = BOX) -> Collected:
    """Collect the regular files with one link that differ from `known`."""
    found, tree, room = Collected(), FileTree(), bounds.files_out_bytes
    root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, folder, name, state in tree.walk(root):
            if path in known and state.st_size == len(known[path]) and _read(folder, name) == known[path]:
                continue
            if len(found.files) >= bounds.files_out or state.st_size > room:
                found.cut = True
                continue
            found.files[path] = _read(folder, name)[:room]
            room -= len(found.files[path])
            if state.st_mode & 0o100:
                found.executable.add(path)
    except OSError:  # a session's processes may change folders concurrently
        found.cut = True
    finally:
        os.close(root)
    found.left_out = tree.left_out
    return found


def _read(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def make_box(bounds: ResourceBounds) -> None:
    """Set the sizes of the run's folders. Raises OSError."""
    mount(None, BOX, None, REMOUNT | NOSUID | NODEV, f"size={bounds.disk_bytes},nr_inodes={bounds.disk_files}")


def put(files: dict[str, bytes], executable: set[str], box: str = BOX) -> None:
    """Write files under the box without following links. Raises OSError."""
    root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, content in files.items():
            _put_one(root, [part for part in path.split("/") if part not in ("", ".")], content, path in executable)
    finally:
        os.close(root)


def mark(modes: dict[str, bool], box: str = BOX) -> None:
    """Set or clear executable flags without following links. Raises OSError."""
    for path, executable in modes.items():
        folder, name = _folder_of(path, box)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            mode = os.fstat(fd).st_mode
            os.fchmod(fd, (mode | 0o111 if executable else mode & ~0o111) & 0o777)
        finally:
            os.close(fd)


def remove(paths: list[str], box: str = BOX) -> None:
    """Remove files without following links; their folders stay. Raises OSError."""
    for path in paths:
        folder, name = _folder_of(path, box)
        try:
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)


def _folder_of(path: str, box: str) -> tuple[int, str]:
    """Return a descriptor of a file's folder, to be closed by the caller, and the file's name."""
    root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *folders, name = [part for part in path.split("/") if part not in ("", ".")]
        return _enter(root, folders, make=False), name
    finally:
        os.close(root)


def _enter(root: int, parts: list[str], make: bool) -> int:
    """Return a descriptor of a folder below `root`."""
    folder = os.dup(root)
    try:
        for part in parts:
            if make:
                with Suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
    except BaseException:
        os.close(folder)
        raise
    return folder


def _put_one(root: int, parts: list[str], content: bytes, executable: bool) -> None:
    folder = _enter(root, parts[:-1], make=True)
    try:
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
    """Empty the box, including deep folders. Raises OSError."""
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
