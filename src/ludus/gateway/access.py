"""Access control: reject web pages of other origins, and require the token on control endpoints."""

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
    """Token of the control endpoints, and the host names allowed in addition to IP addresses."""

    token: str
    hosts: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raise BadRequest if the token is missing or a web page may have sent the request."""
        host = _hostname(request.headers.get("host", ""))
        known = {"localhost", socket.gethostname().lower(), *(name.lower() for name in self.hosts)}
        if not _is_address(host) and host not in known:
            raise BadRequest(
                f"Control endpoints are not served under the host name {host[:80]!r}; use the address, or "
                "start the server with --allow-host.",
                _FORBIDDEN,
            )
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise BadRequest(
                "This path needs the server's control token, as Authorization: Bearer TOKEN; set "
                "in engine.token_file of a trainer.",
                _NO_TOKEN,
            )


def check_origin(request: Request) -> None:
    """Raise BadRequest for a request from a web page of another origin."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise BadRequest(f"Cross-origin requests are refused; the origin is {origin[:80]!r}.", _FORBIDDEN)


def check_json(request: Request) -> None:
    """Raise BadRequest unless the content type is JSON, which plain web forms cannot send."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(f"The content type is {kind[:80]!r}; send Content-Type: application/json.", _WRONG_TYPE)


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
