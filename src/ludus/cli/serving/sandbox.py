"""Check a sandbox, or serve one over HTTP."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from ludus.cli.serving.serve import needs_serve_extra
from ludus.cli.ui.terminal import make_console, print_line
from ludus.engines.control_tokens import token_of
from ludus.errors import UserError
from ludus.sandbox import SERVICES, Limits, Sandbox, SandboxSettings, open_sandbox
from ludus.sandbox.self_test import SelfTestResult, python_version, run_self_test, untested_properties

_REMOTE_BACKENDS = ("remote", *SERVICES)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Check, or serve until interrupted. Raises UserError if the backend is unavailable on this machine."""
    if args.url and args.backend not in _REMOTE_BACKENDS:
        text = f"--url is the address of a service, and --backend is {args.backend}."
        raise UserError(text, f"Name one of {', '.join(_REMOTE_BACKENDS)}.")
    if args.act == "check":
        _check(args)
        return
    if args.backend in _REMOTE_BACKENDS:
        text = f"The {args.backend} backend is remote and cannot be served from here."
        raise UserError(text, "Name a backend of this machine, or check it: ludus sandbox check.")
    settings = _settings(args)
    asyncio.run(_probe(open_sandbox(settings), all_tests=False))
    _serve(args, open_sandbox(settings))


def _settings(args: argparse.Namespace) -> SandboxSettings:
    uses_token = args.backend in _REMOTE_BACKENDS and args.token_file is not None
    options = {name: vars(args)[name] for name in ("backend", "concurrency", "image", "runtime", "url", "unsafe")}
    return SandboxSettings(**options, token=token_of(args.token_file) if uses_token else "")


async def _probe(sandbox: Sandbox, *, all_tests: bool) -> tuple[str, list[SelfTestResult]]:
    """Return the Python version in the sandbox and, if `all_tests`, the results of the self-test."""
    try:
        return await python_version(sandbox), await run_self_test(sandbox) if all_tests else []
    finally:
        await sandbox.close()


def _check(args: argparse.Namespace) -> None:
    """Print the properties of a backend. Raises UserError if it lacks properties that graders need."""
    console = make_console()
    place = f"at {args.url}" if args.url else "here"
    sandbox = open_sandbox(_settings(args))
    version, found = asyncio.run(_probe(sandbox, all_tests=True))
    print_line(console, f"The {sandbox.name} backend runs programs {place}, with Python {version}.")
    table = Table("property", "found")
    for one in found:
        table.add_row(one.test, one.result, style="yellow" if one.failed else "")
    console.print(table)
    print_line(console, f"Not tested: {untested_properties(args.backend)}.")
    if wrong := [one.test for one in found if one.failed]:
        text = f"The {args.backend} backend lacks properties that graders need: {', '.join(wrong)}."
        raise UserError(text, "docs/use/sandbox.md lists them.")


def _serve(args: argparse.Namespace, sandbox: Sandbox) -> None:
    with needs_serve_extra():
        from ludus.gateway.limits import MIB, HttpLimits, http_server, open_socket, url_of
        from ludus.sandbox.remote.server import MAX_BODY_BYTES, SandboxServerSettings, make_app
        from ludus.untrusted.json_service import error_response
    token, console = token_of(args.token_file), make_console()
    ceiling = replace(
        Limits(),
        wall_s=args.max_wall_s,
        cpu_s=8 * args.max_wall_s,
        memory_bytes=args.max_memory_mib * 2**20,
        processes=256,
        open_files=1024,
        file_bytes=2**30,
        disk_bytes=2**30,
        disk_files=100_000,
        output_bytes=16 * 2**20,
        files_out=10_000,
        files_out_bytes=64 * 2**20,
    )
    app = make_app(sandbox, SandboxServerSettings(token=token, ceiling=ceiling))
    with open_socket(args.host, args.port) as listener:
        print_line(console, f"Serving the {sandbox.name} sandbox at {url_of(listener)}")
        if args.token_file is None:
            print_line(console, f"Token: {token}")
        limits = HttpLimits(body_bytes=MAX_BODY_BYTES, buffered_bytes=512 * MIB, requests=1024, body_s=120.0)
        http_server(app, limits, error_response, lifespan=True).run([listener])
