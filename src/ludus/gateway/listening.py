"""The listening socket of a server. Importable without uvicorn."""

from __future__ import annotations

import socket

from ludus.errors import UserError


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on. Raises UserError where the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay (TCP_NODELAY) only if the socket names its protocol: 40 ms an answer else
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"{host}:{port} cannot be listened at: {str(error).rstrip('.')}.",
            "Give another --port, or 0 for a free one.",
        ) from error
    return listener
