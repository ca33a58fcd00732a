"""Write and collect files of the box (the program's working folder): regular files only, never following links."""

from __future__ import annotations

import errno
import os
import stat

from ludus.sandbox.guest.program import BOX
from ludus.sandbox.guest.syscalls import ResourceLimits, Suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Iterator

MAX_DEPTH, MAX_PATH_CHARS = 32, 512
"""Maximum depth of a file, and characters of its path."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class CollectedFiles:
    """The regular files with one link that differ from `known`: contents by path, and the executable ones.

    `cut` is set if limits excluded files or files disappeared meanwhile. `skipped` counts regular files with several
    links, unprintable names, folders that are too deep and paths that are too long; a skipped folder counts once.
    """

    def __init__(self, limits: ResourceLimits, known: dict[str, bytes], box: str = BOX) -> None:
        self.files: dict[str, bytes] = {}
        self.executable: set[str] = set()
        self.cut = False
        self.skipped = 0
        root = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._collect(root, limits, known)
        except OSError:  # a session's processes may change folders concurrently
            self.cut = True
        finally:
            os.close(root)

    def _collect(self, root: int, limits: ResourceLimits, known: dict[str, bytes]) -> None:
        remaining = limits.files_out_bytes
        for path, folder, name, status in self._walk(root):
            if path in known and status.st_size == len(known[path]) and _read(folder, name) == known[path]:
                continue
            if len(self.files) >= limits.files_out or status.st_size > remaining:
                self.cut = True
                continue
            self.files[path] = _read(folder, name)[:remaining]
            remaining -= len(self.files[path])
            if status.st_mode & 0o100:
                self.executable.add(path)

    def _walk(self, root: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int, str, os.stat_result]]:
        """Yield each regular file under a folder descriptor: path, folder descriptor, name, stat."""
        for name in sorted(os.listdir(root)):
            status = os.stat(name, dir_fd=root, follow_symlinks=False)
            unnameable = not name.isprintable() or len(prefix) + len(name) > MAX_PATH_CHARS
            if stat.S_ISREG(status.st_mode):
                if unnameable or status.st_nlink != 1:
                    self.skipped += 1
                else:
                    yield prefix + name, root, name, status
            elif stat.S_ISDIR(status.st_mode):
                if unnameable or depth >= MAX_DEPTH:
                    self.skipped += 1
                    continue
                inner = os.open(name, _FOLDER, dir_fd=root)
                try:
                    yield from self._walk(inner, f"{prefix}{name}/", depth + 1)
                finally:
                    os.close(inner)


def _read(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def write_files(files: dict[str, bytes], executable: set[str], box: str = BOX) -> None:
    """Write files under the box without following links. Raises OSError."""
    for path, content in files.items():
        with open(_open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, box), "wb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EPERM, "not a regular file")
            file.write(content)
            if path in executable:
                os.fchmod(file.fileno(), 0o755)


def set_executable(flags: dict[str, bool]) -> None:
    """Set or clear the executable flag of files of the box without following links. Raises OSError."""
    for path, executable in flags.items():
        fd = _open_file(path, os.O_RDONLY)
        try:
            mode = os.fstat(fd).st_mode
            os.fchmod(fd, (mode | 0o111 if executable else mode & ~0o111) & 0o777)
        finally:
            os.close(fd)


def remove_files(paths: list[str]) -> None:
    """Remove files of the box without following links; their folders stay. Raises OSError."""
    for path in paths:
        folder, name = _open_parent(path, BOX)
        try:
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)


def _open_file(path: str, flags: int, box: str = BOX) -> int:
    folder, name = _open_parent(path, box, create=bool(flags & os.O_CREAT))
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def _open_parent(path: str, box: str, create: bool = False) -> tuple[int, str]:
    """Return a descriptor of a file's folder, to be closed by the caller, and the file's name."""
    folder = os.open(box, os.O_RDONLY | os.O_DIRECTORY)
    *parents, name = [part for part in path.split("/") if part not in ("", ".")]
    try:
        for part in parents:
            if create:
                with Suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
    except BaseException:
        os.close(folder)
        raise
    return folder, name


def clear_box(max_removals: int) -> None:
    """Empty the box, including deep folders. Raises OSError."""
    root = os.open(BOX, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(max_removals):
            names = os.listdir(root)
            if not names:
                return
            _remove_tree(root, names[0], number)
        raise OSError(errno.EBUSY, "files appear faster than they can be removed")
    finally:
        os.close(root)


def _remove_tree(root: int, name: str, number: int) -> None:
    """Remove a file or folder; subfolders of the folder move to `root`, so that depth is unlimited."""
    try:
        os.unlink(name, dir_fd=root)
        return
    except IsADirectoryError:
        inner = os.open(name, _FOLDER, dir_fd=root)
    try:
        for index, child in enumerate(os.listdir(inner)):
            try:
                os.unlink(child, dir_fd=inner)
            except IsADirectoryError:
                os.rename(child, f".gone-{number}-{index}", src_dir_fd=inner, dst_dir_fd=root)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)
