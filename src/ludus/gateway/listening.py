"""The listening socket of a server; importable without uvicorn."""

from __future__ import annotations

import socket

from ludus.errors import UserError


def listening(host: str, port: int) -> socket.socket:
    """Create a listening socket. Raises UserError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the socket names its protocol; otherwise responses take 40 ms more
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"{host}:{port} cannot be bound: {str(error).rstrip('.')}.", "Set another --port, or 0 for a free one."
        ) from error
    return listener
