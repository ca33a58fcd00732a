"""Serve a world over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from threading import Thread

from ludus.cli.arguments import environment_config, raise_first
from ludus.cli.serving.serve import needs_serve_extra
from ludus.cli.ui.terminal import make_console, print_line
from ludus.engines.control_tokens import token_of
from ludus.envs.registry import build_world, check_sandbox

_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Serve the environment `args.name` until interrupted. On addresses of other hosts, clients need a token."""
    raise_first(
        (args.max_episodes < 1, f"--max-episodes is {args.max_episodes}.", "Set 1 or more."),
        (args.idle_s <= 0, f"--idle-s is {args.idle_s:g}.", "Set more than 0."),
    )
    with needs_serve_extra():
        from ludus.envs.remote.server import MAX_BODY_BYTES, EnvServerSettings, make_app
        from ludus.gateway.limits import MIB, HttpLimits, http_server, open_socket, url_of
        from ludus.untrusted.json_service import error_response
    console = make_console()
    config = environment_config(args.name, overrides)
    needs_token = args.host not in _LOCAL or args.token_file is not None
    token = token_of(args.token_file) if needs_token else ""
    with open_socket(args.host, args.port) as listener:
        world = build_world(config.env, config.rollout, config.sandbox)
        check_sandbox(config.sandbox, world)
        app = make_app(world, EnvServerSettings(token, args.max_episodes, args.idle_s))
        if needs_token and args.token_file is None:
            print_line(console, f"Token: {token}")
        print_line(console, f"Serving the world {world.name} at {url_of(listener)}")
        limits = HttpLimits(body_bytes=MAX_BODY_BYTES, buffered_bytes=512 * MIB)
        server = http_server(app, limits, error_response, lifespan=True)
        if args.until_eof:

            def stop_at_eof() -> None:
                while os.read(sys.stdin.fileno(), 4096):
                    pass
                server.should_exit = True

            Thread(target=stop_at_eof, daemon=True).start()
        asyncio.run(server.serve(sockets=[listener]))
