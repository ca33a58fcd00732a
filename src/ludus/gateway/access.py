"""Who may use a server: no web page of another origin, and the control paths only with the token."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from ludus.gateway.protocol.requests import BadRequest

_NO_TOKEN, _FORBIDDEN, _WRONG_TYPE = 401, 403, 415


@dataclass(frozen=True)
class ControlAccess:
    """The token of the control paths, and the names under which they may be called besides addresses."""

    token: str
    hosts: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raise BadRequest for a request that lacks the token, or that a web page may have caused."""
        host = _hostname(request.headers.get("host", ""))
        known = {"localhost", socket.gethostname().lower(), *(name.lower() for name in self.hosts)}
        if not _is_address(host) and host not in known:
            raise BadRequest(
                f"The control paths are not served under the host name {host[:80]!r}; use the address, or "
                "start the server with --allow-host.",
                _FORBIDDEN,
            )
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise BadRequest(
                "This path needs the server's control token, as Authorization: Bearer TOKEN; a trainer takes "
                "it from engine.token_file.",
                _NO_TOKEN,
            )


def check_origin(request: Request) -> None:
    """Raise BadRequest for a request of a web page that this server has not served."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise BadRequest(
            f"Requests of web pages are refused, and this one is of {origin[:80]!r}.", _FORBIDDEN
        )


def check_json(request: Request) -> None:
    """Raise BadRequest for a body that does not say that it is JSON, as no plain web form can."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(
            f"The content type is {kind[:80]!r}; send Content-Type: application/json.", _WRONG_TYPE
        )


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
