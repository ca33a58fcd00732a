"""Control tokens of servers. `ludus serve --control` writes its token to a file named after its port and readable only
by its user. A trainer of the same user on the same machine reads it; any other requires `engine.token_file`."""

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

_GROUP_OR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MIN_CHARACTERS = 16


def read_token(path: Path) -> str:
    """Read a token file. Raises UserError if it is unreadable or holds no token."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"The token cannot be read: {error}.", "Name a readable token file.") from error
    if len(token) < _MIN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise UserError(f"{path} has no token: {_MIN_CHARACTERS} or more printable characters in one line.")
    return token


def token_of(path: Path | None) -> str:
    """Read the token from the file, or create one."""
    return secrets.token_urlsafe(24) if path is None else read_token(path)


@contextmanager
def publish_token(port: int, token: str) -> Iterator[None]:
    """Store the token of the server at `port`, if any, for this user's trainers during the block."""
    if not token:
        yield
        return
    path = _folder() / f"{port}.token"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(path.parent):
            raise OSError(f"{path.parent} belongs to another user")
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError:  # the token is also printed
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == token:  # otherwise another server has taken the port
                path.unlink()


def find_token(url: str) -> str:
    """Return the token stored on this machine by this user's server, or ""."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
        is_local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return ""
    path = _folder() / f"{port}.token"
    try:
        if not is_local or not _is_private(path.parent) or not _is_private(path):
            return ""
        return path.read_text().strip()
    except OSError:
        return ""


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"ludus-servers-{os.getuid()}"


def _is_private(path: Path) -> bool:
    """Return whether a path belongs to this user and is inaccessible to others."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & _GROUP_OR_OTHERS and not stat.S_ISLNK(status.st_mode)
