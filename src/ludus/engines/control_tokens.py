"""The tokens of servers that may be controlled: how a trainer on the same machine finds them.

`ludus serve --control` leaves its token in a file that only its own user can read, named after its port. A
trainer of the same user takes it from there; one elsewhere is given it (`engine.token_file`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from ludus.errors import UserError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SHORTEST = 16


def read_token(path: Path) -> str:
    """The token in a file. Raises UserError for a file that cannot be read or holds none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"The token cannot be read: {error}.", "Name a readable token file.") from error
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable():
        raise UserError(f"{path} has no token: {_SHORTEST} or more printable characters in one line.")
    return token


def token_of(path: Path | None) -> str:
    """The token in the file, or a new one."""
    return secrets.token_urlsafe(24) if path is None else read_token(path)


@contextmanager
def published(port: int, token: str) -> Iterator[None]:
    """Leave the token of the server at `port`, if it has one, for this user's trainers during the block."""
    if not token:
        yield
        return
    path = _folder() / f"{port}.token"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(path.parent):
            raise OSError(f"{path.parent} belongs to somebody else")
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError:  # the token was printed as well
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == token:  # else another server has the port by now
                path.unlink()


def find_token(url: str) -> str:
    """The token that a server of this user has left on this machine; empty if there is none."""
    place = urlsplit(url)
    try:
        port = place.port or 80
        here = place.hostname == "localhost" or ipaddress.ip_address(place.hostname or "").is_loopback
    except ValueError:
        return ""
    path = _folder() / f"{port}.token"
    try:
        if not here or not _is_private(path.parent) or not _is_private(path):
            return ""
        return path.read_text().strip()
    except OSError:
        return ""


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"ludus-servers-{os.getuid()}"


def _is_private(path: Path) -> bool:
    """Whether a path is this user's, and nobody else may read or write it."""
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & _OTHERS and not stat.S_ISLNK(found.st_mode)
